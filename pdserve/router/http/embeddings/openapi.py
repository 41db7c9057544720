"""What the OpenAPI document says of /v1/embeddings. Called by `router.http.openapi`."""

from pdserve.router.http.openapi.schemas import INTEGER, STRING, Json, list_of, object_of


def embedding_limits(inputs: list[Json]) -> dict[str, Json]:
    """What a value of the request must be, besides its type. inputs: what a prompt may be."""
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
    """The answer, by its name among the schemas."""
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
