"""Settings for all tests."""

import os

from hypothesis import HealthCheck, settings

# No deadline: the machine is shared, and no test may depend on time. A failure prints how to
# reproduce it. STATEKIT_HYPOTHESIS=nightly tries much more.
settings.register_profile(
    "ci",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=100,
)
settings.register_profile("nightly", parent=settings.get_profile("ci"), max_examples=5000)
settings.load_profile(os.environ.get("STATEKIT_HYPOTHESIS", "ci"))
