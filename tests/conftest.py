"""For all tests: in continuous integration hypothesis draws the same examples each time."""

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("repeatable")
