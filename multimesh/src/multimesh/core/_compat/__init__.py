"""Everything of JAX that is not its documented interface. CONTRIBUTING.md lists it (jax 0.10 and later).

Private parts make calls faster, and tell how processes were launched. Each has a public fallback with the same results,
except where processes meet: if JAX has moved the part, if this JAX was never tried, or under
``MULTIMESH_PUBLIC_JAX=1``. The code asks what a JAX has, never for its version.

Other rooms write ``_compat.name`` for each name without an underscore of the modules here.
"""

# ruff: noqa: F403

from multimesh.core._compat import versions
from multimesh.core._compat.versions import *

with versions.check_version():
    from multimesh.core._compat.erase import erase as erase
    from multimesh.core._compat.jaxprs import *
    from multimesh.core._compat.lines import *
    from multimesh.core._compat.processes import *
    from multimesh.core._compat.traces import *
    from multimesh.core._compat.typed import *

versions.tell()
