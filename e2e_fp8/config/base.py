"""Common base of all config sections: unknown keys are errors, numbers are finite, values are frozen after parsing."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A group of fields. Every field carries a ``description`` (linted by tools/check_config_docs.py)."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
