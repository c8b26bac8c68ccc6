"""What the OpenAPI description is made of: operations, schemas and their parts."""

from __future__ import annotations

from typing import Any

from imaged.jobs.job import Kind, State

ID = "64 lower-case hex digits: BLAKE3-256"
FRAMES = "application/vnd.pvisor.frame"
PROFILE = "application/vnd.pvisor.profile"


def schemas() -> dict[str, Any]:
    text, number = {"type": "string"}, {"type": "integer"}
    return {
        "Error": object_of(error=string("the fact"), hint=string("the next step; may be empty")),
        "Image": object_of(
            name=text,
            id=string(ID),
            record={"type": "object", "description": "Hashes to the id as sorted, compact ASCII JSON"},
            source=text,
            chunks=number,
            stored_bytes=number,
            created_at={"type": "integer", "description": "Unix seconds"},
        ),
        "Snapshot": object_of(
            name=text,
            id=string(ID),
            record={
                "type": "object",
                "description": "docs/formats/snapshot.md; hashes to the id as sorted, compact ASCII JSON",
            },
            chunks=number,
            stored_bytes=number,
            created_at={"type": "integer", "description": "Unix seconds"},
        ),
        "Conversion": {
            "type": "object",
            "required": ["source"],
            "properties": {
                "source": string("docker://HOST/REPO:TAG"),
                "name": string("repo[:tag]; the repository's own when not given"),
                "platform": string("OS/ARCH[/VARIANT]"),
            },
        },
        "Job": object_of(
            id=string("20 hex digits that sort by time"),
            kind={"type": "string", "enum": [str(kind) for kind in Kind]},
            state={"type": "string", "enum": [str(state) for state in State]},
            source=text,
            name={"type": ["string", "null"]},
            platform={"type": ["string", "null"]},
            namespace={"type": ["string", "null"]},
            starts={"type": "integer", "description": "How often it was begun"},
            created_at={"type": "integer", "description": "Unix seconds"},
            started_at={"type": ["integer", "null"]},
            ended_at={"type": ["integer", "null"]},
            progress={"type": "object", "description": "step, done_bytes, total_bytes"},
            image={"type": ["object", "null"], "description": "name, id and warnings of a conversion that is done"},
            report={"type": ["object", "null"], "description": "what a collection that is done did"},
            error=text,
            hint=text,
        ),
    }


def operation(
    summary: str,
    responses: dict[str, Any],
    *,
    parameters: list[dict[str, Any]] | None = None,
    body: dict[str, Any] | None = None,
) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if parameters:
        operation["parameters"] = parameters
    if body:
        operation["requestBody"] = body
    return operation


def json_answer(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def json_body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def ids_body() -> dict[str, Any]:
    ids = {"type": "array", "maxItems": 4096, "items": string(ID)}
    raw = {"schema": {"type": "string", "format": "binary", "description": "32 bytes for each id"}}
    return {
        "required": True,
        "content": {"application/json": {"schema": object_of(ids=ids)}, "application/octet-stream": raw},
    }


def binary(media_type: str) -> dict[str, Any]:
    return {media_type: {"schema": {"type": "string", "format": "binary"}}}


def errors(*statuses: str) -> dict[str, Any]:
    return {status: json_answer("Refused", ref("Error")) for status in statuses}


def ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def object_of(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


def array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def string(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def in_query(name: str, *values: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": {"type": "string", "enum": list(values)}}
