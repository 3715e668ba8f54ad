"""Pages from the templates beside this file: what is filled in is escaped, a missing value is an error."""

from __future__ import annotations

from typing import Any


def page(template: str, **values: Any) -> str:
    """The HTML of a template of this room."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("confide.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(values)
