"""What every test shares."""

from hypothesis import settings

# How long an example takes is the machine's load, not a finding.
settings.register_profile("house", deadline=None)
settings.load_profile("house")
