"""The settings of a rival's step, and the options that the search for the quickest one tries.

A setting is a dict with the keys of BASE. An option is a change of a setting: some of these keys
with other values.
"""

# The setting that options change: an autocast step with fp32 weights, as one CUDA graph.
BASE = {
    "precision": "autocast",  # autocast | bf16: the weights, too | fp32
    "optimizer": "fused",  # fused | torchao | own: see adamw.py
    "compile": "layers",  # whole | layers | none
    "mode": None,  # that of torch.compile; "inductor" does not count beside it
    "inductor": {},  # options of torch.compile
    "graph": True,  # a CUDA graph of the whole step
    "fp8": None,  # a recipe of torchao's float8 training and the layers: "tensorwise all"
    "sdpa": None,  # cudnn | flash: the only kernel that scaled_dot_product_attention may take
    "blas": None,  # cublaslt
    "packing": "deal",  # deal | fill: see packing.py
    "budget": None,  # tokens of a packed sequence; None: as many as the fullest needs, in tiles
    "model": {},  # options of Bert, MPNet or GPT2
    "optimizer_options": {},  # options of PublicAdamW or CompiledAdamW
}

STOCHASTIC = {"precision": "bf16", "optimizer": "own"}
# What the search of a peer starts with: for MPNet what was found to pay for BERT, so that only its
# own attention is searched, and whether to compile it whole still pays: with several kinds of rows
# that takes a minute, which a short training does not win back.
START = {
    "bert": [],
    "mpnet": [
        STOCHASTIC | {"optimizer_options": {"hashed": True, "together": True}},
        {"model": {"drawn_at_once": True}},
    ],
    "gpt2": [],
}
# The options of the search, by peer and by group; options of one group exclude one another. The
# comment is what was expected of each before it was measured: milliseconds of a BERT step of 32
# samples, which takes about 11.5 on an H100, and a share of GPT-2's step.
OPTIONS = {
    "bert": {
        "weights": {
            "bf16 weights, PyTorch's AdamW": {"precision": "bf16"},  # -0.7: no casts, fewer bytes
            "torchao's AdamW": {"precision": "bf16", "optimizer": "torchao"},  # -0.5
            "own AdamW": STOCHASTIC,  # -1.0: one kernel for all small parameters, clipping in it
            "own AdamW, hashed": STOCHASTIC | {"optimizer_options": {"hashed": True}},  # -1.1
            "own AdamW, hashed, together": STOCHASTIC
            | {"optimizer_options": {"hashed": True, "together": True}},  # -1.15
            "own AdamW, masters": STOCHASTIC
            | {"optimizer_options": {"masters": True, "moments": "float32"}},  # -0.3
        },
        "compile": {
            "compiled whole": {"compile": "whole"},  # -0.1: embeddings and loss fuse
            "compiled whole, max-autotune": {
                "compile": "whole",
                "mode": "max-autotune-no-cudagraphs",
            },  # -0.2
            "layers, max-autotune": {"mode": "max-autotune-no-cudagraphs"},  # -0.1
            "coordinate descent": {"inductor": {"coordinate_descent_tuning": True}},  # -0.15
            "combo kernels": {"inductor": {"combo_kernels": True}},  # -0.05
            "fast math": {"inductor": {"use_fast_math": True}},  # -0.1
        },
        "types": {"types blended": {"model": {"blend_types": True}}},  # -0.05: no contended scatter
        "dropout": {"dropout drawn at once": {"model": {"drawn_at_once": True}}},  # -0.2
        "gelu": {"tanh GELU": {"model": {"gelu": "tanh"}}},  # -0.05
        "attention": {"cuDNN attention": {"model": {"attention": "cudnn"}}},  # fails, or +-0.3
        "blas": {"cublasLt": {"blas": "cublaslt"}},  # 0
        "fp8": {
            "FP8 tensorwise": {"fp8": "tensorwise all"},  # +2: casts are kernels of their own
            "FP8 tensorwise, feed-forward": {"fp8": "tensorwise up down"},  # +1
            "FP8 rowwise": {"fp8": "rowwise all"},  # +1.5
        },
        "packing": {
            "5,488 tokens": {"budget": 5488},  # 0: the last tile is computed anyway
            "filled to 5,632 tokens": {
                "packing": "fill",
                "budget": 5632,
            },  # +2 % samples/s: whole waves
        },
    },
    # Over one call of the memory-efficient kernel, whose masks are 4.4 times what the samples need.
    # In milliseconds of a step of 32 samples, which takes about 16 with it.
    "mpnet": {
        "attention": {
            "efficient, 4 calls": {"model": {"calls": 4}},  # -4: rows and masks of 1.5 times
            "efficient, 8 calls": {"model": {"calls": 8}},  # -4.5: 1.3 times, but small kernels
            "eager, 4 calls": {"model": {"attention": "eager", "calls": 4}},  # -3
            "eager, 8 calls": {"model": {"attention": "eager", "calls": 8}},  # -4: fewer bytes yet
            "eager, 2 calls": {"model": {"attention": "eager", "calls": 2}},  # -1
        },
        "compile": {"compiled whole": {"compile": "whole"}},  # -0.3, as with BERT
    },
    "gpt2": {
        "weights": {
            "bf16 weights, PyTorch's AdamW": {"precision": "bf16"},  # -4 % of the step
            "torchao's AdamW": {"precision": "bf16", "optimizer": "torchao"},  # -4 %
            "own AdamW, hashed": STOCHASTIC | {"optimizer_options": {"hashed": True}},  # -5 %
        },
        "compile": {
            "compiled whole": {"compile": "whole"},  # -0.5 %
            "layers, max-autotune": {"mode": "max-autotune-no-cudagraphs"},  # -1 %
            "coordinate descent": {"inductor": {"coordinate_descent_tuning": True}},  # -1 %
            "fast math": {"inductor": {"use_fast_math": True}},  # -0.5 %
        },
        "dropout": {"dropout drawn at once": {"model": {"drawn_at_once": True}}},  # -2 %
        "attention": {
            "cuDNN attention": {"sdpa": "cudnn"},  # -5 %: Hopper's own instructions
        },
        "loss": {
            "vocabulary of 50,304": {"model": {"align": 64}},  # -1 %
            "50,304, loss in chunks": {"model": {"align": 64, "loss": "chunked"}},  # 0, -4 GiB
            "Liger's loss": {"graph": False, "model": {"loss": "liger"}},  # +5 %, -4 GiB
        },
        "blas": {"cublasLt": {"blas": "cublaslt"}},  # 0
        "fp8": {
            "FP8 tensorwise": {"fp8": "tensorwise all"},  # +-3 %
            "FP8 rowwise": {"fp8": "rowwise all"},  # +5 %
            "FP8 rowwise, wgrad in bf16": {"fp8": "rowwise_with_gw_hp all"},  # +3 %
        },
    },
}
# Options that are measured alone and never added: they show what a part costs, or do less work.
ALONE = {
    "bert": {
        "no graph": {"graph": False},
        "not compiled": {"compile": "none"},
        "neither": {"compile": "none", "graph": False},
        "FlexAttention, without its dropout": {
            "compile": "whole",
            "model": {"attention": "flex", "attention_dropout": 0.0},
        },
        "no dropout in attention": {"model": {"attention_dropout": 0.0}},
    },
    "mpnet": {
        "FlexAttention, without its dropout": {
            "model": {"attention": "flex", "attention_dropout": 0.0},
        },
        "efficient, 4 calls, no dropout in attention": {
            "model": {"calls": 4, "attention_dropout": 0.0}
        },
    },
    "gpt2": {
        "no graph": {"graph": False},
        "FlexAttention, without its dropout": {
            "compile": "whole",
            "model": {"attention": "flex", "attention_dropout": 0.0},
        },
        "no dropout in attention": {"model": {"attention_dropout": 0.0}},
    },
}


def merged(*changes: dict) -> dict:
    """Return BASE with `changes`, of which a later one wins.

    Values that are dicts, such as the options of a model, are joined.

    Raises ValueError: BASE has no key of that name.
    """
    setting = dict(BASE)
    for change in changes:
        for name, value in change.items():
            if name not in BASE:
                raise ValueError(f"a setting has no {name!r}; it has {', '.join(BASE)}")
            if isinstance(value, dict):
                setting[name] = setting[name] | value
            else:
                setting[name] = value
    return setting


def without_defaults(setting: dict) -> dict:
    """Return the part of a setting that differs from BASE."""
    return {name: value for name, value in setting.items() if value != BASE[name]}
