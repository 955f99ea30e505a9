"""Fine-tuning for question answering, fast and lean: one change at a time, each measured."""

import logging

# Whichever library imports them, on some machines they warn of kernels that nothing here uses.
for package in ("bitsandbytes", "torchao"):
    logging.getLogger(package).setLevel(logging.ERROR)
