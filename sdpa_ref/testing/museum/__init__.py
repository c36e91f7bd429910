"""The bug museum: kernels that are wrong in the way of real, public bugs, to prove that the suite sees them.

`FAULTS` has them by name; `see` holds one against the suite, `tour` all of them. ``sdpa-ref museum`` prints the table.
"""

from sdpa_ref.testing.museum.catalogue import FAULTS, ROOMS
from sdpa_ref.testing.museum.exhibit import Fault, fault, target_of
from sdpa_ref.testing.museum.kernel import Kernel
from sdpa_ref.testing.museum.tour import Sighting, markdown, see, tour

__all__ = ["FAULTS", "ROOMS", "Fault", "Kernel", "Sighting", "fault", "markdown", "see", "target_of", "tour"]
