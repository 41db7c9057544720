"""The base of all configuration: values are frozen, and an unknown key is an error, as is a word
that YAML reads as true or false."""

import difflib
from collections.abc import Mapping
from typing import Any, Literal, Self, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)


def sentences_of(error: ValidationError, root: str = "") -> str:
    """Joins all complaints into one text, each with its place below `root`."""
    lines = []
    for one in error.errors():
        steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in one["loc"]]
        place = (root + "".join(steps)).removeprefix(".")
        message = one["msg"].removeprefix("Value error, ")
        lines.append(f"{place}: {message}" if place else message)
    return "; ".join(lines)


def _is_word(annotation: Any) -> bool:
    """Whether a type allows only certain words."""
    return get_origin(annotation) is Literal and all(
        isinstance(value, str) for value in get_args(annotation)
    )


class Config(BaseModel):
    """Base of all configuration."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        hide_input_in_errors=True,
        use_attribute_docstrings=True,  # the string below a field is its description
    )

    @classmethod
    def read(cls, fields: Mapping[str, Any], root: str = "") -> Self:
        """Makes the configuration. Raises a ValueError in sentences that name each bad field by its
        place below `root`."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise ValueError(sentences_of(error, root)) from error

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    near = difflib.get_close_matches(str(key), cls.model_fields, n=1, cutoff=0.0)
                    raise ValueError(
                        f"unknown key {key!r} in {cls.__name__}: did you mean {near[0]!r}?"
                    )
        return data

    @field_validator("*", mode="before")
    @classmethod
    def _name_unquoted_words(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse words that YAML has read as true or false, except an unambiguous `off`."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and _is_word(annotation):
            if value is False and "off" in get_args(annotation):
                return "off"
            raise ValueError(
                f"{info.field_name} is {str(value).lower()} here: YAML reads an unquoted off or no "
                "as false, and on or "
                'yes as true; put the word in quotes, as "off"'
            )
        return value
