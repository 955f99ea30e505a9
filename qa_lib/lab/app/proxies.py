"""Gradio beside proxies: requests to this machine go past those that the environment names.

The app's other modules take Gradio from here, as `gr`: it makes a client of its own when it is
imported, and httpx lacks a package for some proxies.
"""

import contextlib
import os
import urllib.request
from collections.abc import Iterator

import httpx

from qa_lib.errors import UserError, first_line


@contextlib.contextmanager
def past_proxies(share: bool) -> Iterator[None]:
    """Send requests to this machine past the proxies of the environment, inside the block.

    Gradio asks its own server whether it answers, which a proxy elsewhere cannot tell. No proxy
    variable is set inside, so that not even a broken one matters. With `share` they stay set, since
    Gradio asks its makers' server, too, and only this machine is left out. Raises UserError, which
    names the variables, where no request can be sent with them.
    """
    before = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    inside = {}
    if share and before:
        inside = before | {"no_proxy": _no_proxy_with_this_machine()}
    for name in before:
        del os.environ[name]
    os.environ.update(inside)
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL, ImportError, ValueError) as problem:
        if not inside:
            raise
        raise UserError(
            f"the page's server cannot be asked while {', '.join(before)} is set: "
            f"{first_line(problem)}"
        ) from problem
    finally:
        for name in inside:
            del os.environ[name]
        os.environ.update(before)


def _no_proxy_with_this_machine() -> str:
    """Return the value of `no_proxy` by which this machine is left out as well."""
    this_machine = "127.0.0.1,localhost"
    others = urllib.request.getproxies_environment().get("no")
    return f"{others},{this_machine}" if others else this_machine


with past_proxies(share=False):
    import gradio as gr

__all__ = ["gr", "past_proxies"]
