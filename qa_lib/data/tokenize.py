"""Tokenizers: how one is found, and what it says about itself: how it joins a question and a context, and whether it
gives token types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import tokenizers

from qa_lib.data.synthetic import vocabulary
from qa_lib.errors import UserError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

TEXTS_PER_CALL = 2_000  # one call's encodings take some 150 bytes a token, so not all texts at once


def bare(tokenizer) -> tokenizers.Tokenizer:
    """The backend of a fast tokenizer of transformers, without the truncation and padding that its file or an earlier
    call left switched on; transformers sets both at each call of its own. Raises UserError for another tokenizer."""
    if not getattr(tokenizer, "is_fast", False):
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise UserError(f"{name}: no fast tokenizer of transformers, which alone say where their tokens come from")
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return backend


class Layout(NamedTuple):
    """How a tokenizer joins a question and a context (BERT: [CLS] question [SEP] context [SEP]): how many special
    tokens a window has, how many of them after the context, the token that pads, and whether token types go with them,
    0 up to the context and 1 from there."""

    special: int
    after: int
    pad: int
    segments: bool


def find_layout(tokenizer, backend) -> Layout:
    """What the tokenizer does with a pair of texts; UserError where no window can be made of that."""
    pair = backend.encode("who", "he")
    whose = "".join("-" if text is None else str(text) for text in pair.sequence_ids)
    parts = re.fullmatch("-+0+-*1+(-*)", whose)
    if not parts or tokenizer.pad_token_id is None:
        raise UserError(
            f"{type(tokenizer).__name__} does not join texts as a special token (where no answer points), question, "
            "context; or it has no token that pads"
        )
    segments = "token_type_ids" in tokenizer.model_input_names and 1 in pair.type_ids
    return Layout(whose.count("-"), len(parts[1]), tokenizer.pad_token_id, segments)


def encodings(backend, texts: list, add_special_tokens: bool) -> Iterator[tokenizers.Encoding]:
    """What the backend makes of each text, or pair of texts."""
    for first in range(0, len(texts), TEXTS_PER_CALL):
        yield from backend.encode_batch(texts[first : first + TEXTS_PER_CALL], add_special_tokens=add_special_tokens)


def build_tokenizer(source: str | Path) -> Tokenizer:
    """The tokenizer of a run: of the synthetic text for "tiny", else of a folder or hub name. Never remote code. Raises
    UserError where there is none, or one that transformers cannot read."""
    from transformers import AutoTokenizer, BertTokenizer  # a second, for which drivers do not wait

    if source == "tiny":
        return BertTokenizer(vocab={word: index for index, word in enumerate(vocabulary())})
    try:
        found = AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=Path(source).is_dir())
        found("a word")  # some of what is in its files is only looked at when it is used
        return found
    except Exception as error:  # whatever the libraries make of a damaged folder
        raise UserError(f"{source}: its tokenizer cannot be loaded: {first_line(error)}") from None
