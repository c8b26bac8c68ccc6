"""The OpenAPI description that a server gives at /v1/openapi.json; a test holds it against the routes."""

from __future__ import annotations

from typing import Any

_ID = "64 lower-case hex digits: BLAKE3-256"
_FRAMES = "application/vnd.pvisor.frame"
_PROFILE = "application/vnd.pvisor.profile"


def document() -> dict[str, Any]:
    """The whole description, as JSON."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "pVisor chunk server",
            "version": "1",
            "description": "Images and snapshots of virtual machines as content-addressed chunks. A chunk travels as a "
            "frame: docs/formats/frame.md.",
        },
        "paths": {
            "/v1/images": {
                "get": _operation("All named images", {"200": _json("Images", _object(images=_array(_ref("Image"))))}),
                "post": _operation(
                    "Convert a registry's image; an unfinished job for the same is joined",
                    {"202": _json("The job", _object(job=_string("its id")))} | _errors("400", "403"),
                    body=_json_body(_ref("Conversion")),
                ),
            },
            "/v1/images/{name}": {
                "get": _operation(
                    "One image, by name, by the unique end of a name, or by id",
                    {
                        "200": {
                            "description": "The image; with view=boot its record, roots, metadata and the leaves that "
                            "its profile names as frames, and the image without its record in the Pvisor-Image header; "
                            "with profile=frame the profile before them, with profile=chunks what it names after them",
                            "content": {"application/json": {"schema": _ref("Image")}, **_binary()},
                        },
                        "304": {"description": "If-None-Match names the current id"},
                    }
                    | _errors("400", "404"),
                    parameters=[_in_path("name"), _in_query("view", "boot"), _in_query("profile", "frame", "chunks")],
                ),
                "put": _operation(
                    "Name an image of which every chunk is here",
                    {"200": _json("The image", _ref("Image"))} | _errors("400", "409"),
                    parameters=[_in_path("name")],
                    body=_json_body(_object(id=_string(_ID))),
                ),
            },
            "/v1/snapshots": {
                "get": _operation(
                    "All named snapshots", {"200": _json("Snapshots", _object(snapshots=_array(_ref("Snapshot"))))}
                )
            },
            "/v1/snapshots/{name}": {
                "get": _operation(
                    "One snapshot, by name, by id, or by the start of an id of 8 or more digits",
                    {
                        "200": {
                            "description": "The snapshot; with view=boot its records, device state, metadata, roots "
                            "and the leaves that the profile of its memory names as frames, and the snapshot without "
                            "its record in the Pvisor-Snapshot header; with profile=frame the profile before them",
                            "content": {"application/json": {"schema": _ref("Snapshot")}, **_binary()},
                        },
                        "304": {"description": "If-None-Match names the current id"},
                    }
                    | _errors("400", "404"),
                    parameters=[_in_path("name"), _in_query("view", "boot"), _in_query("profile", "frame")],
                ),
                "put": _operation(
                    "Name a snapshot of which every chunk is here, those of its image among them; 409 also when the "
                    "name stands for another snapshot than `replaces`",
                    {"200": _json("The snapshot", _ref("Snapshot"))} | _errors("400", "403", "409", "507"),
                    parameters=[_in_path("name")],
                    body=_json_body(
                        _object(id=_string(_ID))
                        | {"properties": {"id": _string(_ID), "replaces": _string("the id it may take it from, or *")}}
                    ),
                ),
            },
            "/v1/profiles/{name}": {
                "get": _operation(
                    "The profile of an image, or of a snapshot by its id: docs/formats/profile.md",
                    {"200": {"description": "The profile", "content": _binary(_PROFILE)}} | _errors("400", "404"),
                    parameters=[_in_path("name")],
                ),
                "put": _operation(
                    "Merge one recorded run: ids in order of first touch; what is not of the image is left out",
                    {"200": _json("The profile", _object(runs={"type": "integer"}, entries={"type": "integer"}))}
                    | _errors("400", "403", "404", "507"),
                    parameters=[_in_path("name")],
                    body=_ids_body(),
                ),
            },
            "/v1/jobs/{id}": {
                "get": _operation(
                    "How far a conversion is",
                    {"200": _json("The job", _ref("Job"))} | _errors("404"),
                    parameters=[_in_path("id")],
                )
            },
            "/v1/chunks/{id}": {
                "get": _operation(
                    "One frame; immutable",
                    {"200": {"description": "The frame", "content": _binary()}} | _errors("400", "404"),
                    parameters=[_in_path("id")],
                )
            },
            "/v1/chunks/batch": {
                "post": _operation(
                    "Frames in the order of the ids; codec 255 and no payload for each one that is not here",
                    {"200": {"description": "The frames", "content": _binary()}} | _errors("400"),
                    body=_ids_body(),
                )
            },
            "/v1/chunks/missing": {
                "post": _operation(
                    "Which of these chunks are not here",
                    {"200": _json("Ids", _object(missing=_array(_string(_ID))))} | _errors("400"),
                    body=_ids_body(),
                )
            },
            "/v1/chunks": {
                "put": _operation(
                    "Store frames; each is verified, the first wrong one ends the request, those before it stay",
                    {"200": _json("How many", _object(stored={"type": "integer"}))} | _errors("400", "403", "507"),
                    body={"required": True, "content": _binary()},
                )
            },
            "/v1/openapi.json": {"get": _operation("This document", {"200": {"description": "OpenAPI"}})},
            "/healthz": {"get": _operation("The process answers", {"200": {"description": "ok"}})},
            "/readyz": {"get": _operation("Requests may come here", {"200": {"description": "ok"}} | _errors("503"))},
        },
        "components": {"schemas": _schemas()},
    }


def _schemas() -> dict[str, Any]:
    text, number = {"type": "string"}, {"type": "integer"}
    return {
        "Error": _object(error=_string("the fact"), hint=_string("the next step; may be empty")),
        "Image": _object(
            name=text,
            id=_string(_ID),
            record={"type": "object", "description": "Hashes to the id as sorted, compact ASCII JSON"},
            source=text,
            chunks=number,
            stored_bytes=number,
            created_at={"type": "integer", "description": "Unix seconds"},
        ),
        "Snapshot": _object(
            name=text,
            id=_string(_ID),
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
                "source": _string("docker://HOST/REPO:TAG"),
                "name": _string("repo[:tag]; the repository's own when not given"),
                "platform": _string("OS/ARCH[/VARIANT]"),
            },
        },
        "Job": _object(
            id=text,
            state={"type": "string", "enum": ["queued", "running", "done", "failed"]},
            source=text,
            name={"type": ["string", "null"]},
            platform={"type": ["string", "null"]},
            progress={"type": "object", "description": "step, done_bytes, total_bytes"},
            image={"type": ["object", "null"], "description": "name, id and warnings when done"},
            error=text,
            hint=text,
        ),
    }


def _operation(
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


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _json_body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _ids_body() -> dict[str, Any]:
    ids = {"type": "array", "maxItems": 4096, "items": _string(_ID)}
    raw = {"schema": {"type": "string", "format": "binary", "description": "32 bytes for each id"}}
    return {
        "required": True,
        "content": {"application/json": {"schema": _object(ids=ids)}, "application/octet-stream": raw},
    }


def _binary(media_type: str = _FRAMES) -> dict[str, Any]:
    return {media_type: {"schema": {"type": "string", "format": "binary"}}}


def _errors(*statuses: str) -> dict[str, Any]:
    return {status: _json("Refused", _ref("Error")) for status in statuses}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


def _array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _string(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _in_query(name: str, *values: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": {"type": "string", "enum": list(values)}}
