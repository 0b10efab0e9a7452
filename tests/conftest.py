"""For all tests: a generated example may take as long as a busy machine needs."""

from hypothesis import settings

settings.register_profile("anabranch", deadline=None)
settings.load_profile("anabranch")
