"""How fast and how lean BERT can be fine-tuned for extractive question answering on SQuAD v2."""

import logging
import warnings

# On import it warns of a 4-bit CPU kernel that nothing here uses.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
# peft asks transformers by a name that transformers 5.23 deprecates.
warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
