"""Describes /v1/embeddings for the OpenAPI document. Called by `router.http.openapi`."""

from pdserve.router.http.openapi.schemas import INTEGER, STRING, Json, list_of, object_of


def embedding_limits(inputs: list[Json]) -> dict[str, Json]:
    """Returns the limits of the request's values, besides their types. `inputs` describes a
    prompt."""
    return {
        "input": {"anyOf": inputs},
        "dimensions": {"minimum": 1, "description": "At most the size of the model's embeddings."},
        "truncate_prompt_tokens": {
            "minimum": -1,
            "not": {"const": 0},
            "description": "Each input is cut to its first tokens; -1: as many as fit.",
        },
    }


def embedding_answers() -> dict[str, Json]:
    """Returns the answer, by its name among the schemas."""
    number: Json = {"type": "number"}
    item = object_of(
        object={"const": "embedding"}, index=INTEGER, embedding={"anyOf": [list_of(number), STRING]}
    )
    return {
        "Embeddings": object_of(
            id=STRING,
            object={"const": "list"},
            created=INTEGER,
            model=STRING,
            data=list_of(item),
            usage=object_of(prompt_tokens=INTEGER, total_tokens=INTEGER),
        )
    }
