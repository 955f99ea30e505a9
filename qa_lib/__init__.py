"""Fine-tuning for question answering, fast and lean: one change at a time, each measured."""

import logging

# Whichever library imports it, bitsandbytes warns on some processors of a CPU kernel that nothing here uses.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
