"""Common base of all config sections: unknown keys are errors, numbers are finite, values are frozen after parsing."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A group of fields. Every field carries a ``description`` (linted by tools/check_config_docs.py)."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """``steps: true`` is a mistake, though Python counts True as 1."""
        if isinstance(value, bool) and info.field_name and cls.model_fields[info.field_name].annotation in (int, float):
            raise PydanticCustomError("int_type", "must be a number")
        return value
