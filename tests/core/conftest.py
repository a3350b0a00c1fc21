"""Properties are about results; how long one example takes says more about who else uses the machine."""

from hypothesis import settings

settings.register_profile("core", deadline=None)
settings.load_profile("core")
