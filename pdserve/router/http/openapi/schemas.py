"""Small JSON Schemas that make up the parts of the document. Knows no torch and no dialect."""

from typing import Any

Json = dict[str, Any]

REF = "#/components/schemas/{name}"
NULL: Json = {"type": "null"}
STRING: Json = {"type": "string"}
INTEGER: Json = {"type": "integer"}
TOKEN_IDS: Json = {"type": "array", "items": INTEGER}


def ref(name: str) -> Json:
    return {"$ref": REF.format(name=name)}


def object_of(**properties: Json) -> Json:
    """Returns an object's schema that requires all properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def list_of(items: Json) -> Json:
    return {"type": "array", "items": items}


def closed(schema: Json) -> Json:
    """Returns the schema of an object whose other members may only be null."""
    return schema | {"additionalProperties": NULL}
