"""Settings of the whole suite."""

from hypothesis import settings

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("e2e_fp8", deadline=None)
settings.load_profile("e2e_fp8")
