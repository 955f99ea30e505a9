"""Questions and text, from files to batches.

Whatever trains, scores or answers imports this package before PyTorch and transformers, so that a
version of these that is too old is told here, in one line. `qa_lib` itself says nothing: the setup
cell of a notebook imports it in order to mend such an environment.
"""

from qa_lib.versions import check_versions

check_versions()
