"""Settings for all tests."""

from hypothesis import HealthCheck, settings

# No deadline: the machine is shared, and no test may depend on time. A failure prints its seed.
settings.register_profile(
    "statekit",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("statekit")
