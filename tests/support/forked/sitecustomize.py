"""Python imports this when it starts with this folder on PYTHONPATH."""

import template_of_workers  # noqa: F401
