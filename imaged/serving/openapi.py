"""The OpenAPI description that a server gives at /v1/openapi.json; a test holds it against the routes."""

from __future__ import annotations

from typing import Any

from imaged.serving.access import ROUTES, Need
from imaged.serving.openapiparts import (
    FRAMES,
    ID,
    PROFILE,
    array,
    binary,
    errors,
    ids_body,
    in_path,
    in_query,
    json_answer,
    json_body,
    object_of,
    operation,
    ref,
    schemas,
    string,
)

Operations = dict[str, dict[str, Any]]
NUMBER = {"type": "integer"}
_LEASE = object_of(id=string("its id"), expires_at={"type": "number"}, gone=array(string(ID)))
_KEEPS = {"type": "array", "maxItems": 4096, "items": string(ID)}
_TTL_S = {"type": "number", "minimum": 1, "maximum": 86400}
NAME_IN_PATH, ID_IN_PATH = in_path("name"), in_path("id")

IMAGES: dict[str, Operations] = {
    "/v1/images": {
        "get": operation("All named images", {"200": json_answer("Images", object_of(images=array(ref("Image"))))}),
        "post": operation(
            "Convert a registry's image; an unfinished job for the same is joined",
            {"202": json_answer("The job", object_of(job=string("its id")))} | errors("400", "403", "429", "507"),
            body=json_body(ref("Conversion")),
        ),
    },
    "/v1/images/{name}": {
        "get": operation(
            "One image, by name, by the unique end of a name, or by id",
            {
                "200": {
                    "description": "The image; with view=boot its record, roots, metadata and the leaves that its "
                    "profile names as frames, and the image without its record in the Pvisor-Image header; with "
                    "profile=frame the profile before them, with profile=chunks what it names after them",
                    "content": {"application/json": {"schema": ref("Image")}, **binary(FRAMES)},
                },
                "304": {"description": "If-None-Match names the current id"},
            }
            | errors("400", "404", "502", "508"),
            parameters=[NAME_IN_PATH, in_query("view", "boot"), in_query("profile", "frame", "chunks")],
        ),
        "put": operation(
            "Name an image of which every chunk is here",
            {"200": json_answer("The image", ref("Image"))} | errors("400", "409"),
            parameters=[NAME_IN_PATH],
            body=json_body(object_of(id=string(ID))),
        ),
        "delete": operation(
            "Take a name away; what it stood for goes with the next collection, unless something else keeps it",
            {"200": json_answer("The whole name", object_of(removed=string("its name")))} | errors("400", "404"),
            parameters=[NAME_IN_PATH],
        ),
    },
}

SNAPSHOTS: dict[str, Operations] = {
    "/v1/snapshots": {
        "get": operation(
            "All named snapshots", {"200": json_answer("Snapshots", object_of(snapshots=array(ref("Snapshot"))))}
        )
    },
    "/v1/snapshots/{name}": {
        "get": operation(
            "One snapshot, by name, by id, or by the start of an id of 8 or more digits",
            {
                "200": {
                    "description": "The snapshot; with view=boot its records, device state, metadata, roots and the "
                    "leaves that the profile of its memory names as frames, and the snapshot without its record in the "
                    "Pvisor-Snapshot header; with profile=frame the profile before them",
                    "content": {"application/json": {"schema": ref("Snapshot")}, **binary(FRAMES)},
                },
                "304": {"description": "If-None-Match names the current id"},
            }
            | errors("400", "404", "502", "508"),
            parameters=[NAME_IN_PATH, in_query("view", "boot"), in_query("profile", "frame")],
        ),
        "put": operation(
            "Name a snapshot of which every chunk is here, those of its image among them; 409 also when the name "
            "stands for another snapshot than `replaces`",
            {"200": json_answer("The snapshot", ref("Snapshot"))} | errors("400", "403", "409", "507"),
            parameters=[NAME_IN_PATH],
            body=json_body(
                object_of(id=string(ID))
                | {"properties": {"id": string(ID), "replaces": string("the id it may take it from, or *")}}
            ),
        ),
        "delete": operation(
            "Take a name away; what it stood for goes with the next collection, unless something else keeps it",
            {"200": json_answer("The name", object_of(removed=string("its name")))} | errors("400", "404"),
            parameters=[NAME_IN_PATH],
        ),
    },
}

PROFILES: dict[str, Operations] = {
    "/v1/profiles/{name}": {
        "get": operation(
            "The profile of an image, or of a snapshot by its id: docs/formats/profile.md",
            {"200": {"description": "The profile", "content": binary(PROFILE)}} | errors("400", "404", "502", "508"),
            parameters=[NAME_IN_PATH],
        ),
        "put": operation(
            "Merge one recorded run: ids in order of first touch; what is not of the image is left out",
            {"200": json_answer("The profile", object_of(runs=NUMBER, entries=NUMBER))}
            | errors("400", "403", "404", "502", "507", "508"),
            parameters=[NAME_IN_PATH],
            body=ids_body(),
        ),
    },
}

JOBS: dict[str, Operations] = {
    "/v1/jobs": {
        "get": operation(
            "The jobs that are remembered, the newest first; of warnings only how many there were",
            {"200": json_answer("Jobs", object_of(jobs=array(ref("Job"))))},
        )
    },
    "/v1/jobs/{id}": {
        "get": operation(
            "How far a job is, or what it came to",
            {"200": json_answer("The job", ref("Job"))} | errors("404"),
            parameters=[ID_IN_PATH],
        ),
        "delete": operation(
            "Cancel a job, for all who asked for it; 409 when it has ended another way",
            {"200": json_answer("The job, cancelled", ref("Job"))} | errors("404", "409"),
            parameters=[ID_IN_PATH],
        ),
    },
    "/v1/gc": {
        "post": operation(
            "Collect what nothing keeps alive; a collection that waits or runs is joined",
            {"202": json_answer("The job", object_of(job=string("its id")))} | errors("403", "429", "507"),
        )
    },
}

LEASES: dict[str, Operations] = {
    "/v1/leases": {
        "post": operation(
            "A lease: with `keeps` these images and snapshots stay; without, what its holder uploads, or is told that "
            "is here, stays until it is named",
            {"201": json_answer("The lease", _LEASE)} | errors("400", "403", "507"),
            body=json_body(
                {
                    "type": "object",
                    "required": ["holder"],
                    "properties": {"holder": string("who it is, for messages"), "keeps": _KEEPS, "ttl_s": _TTL_S},
                }
            ),
        )
    },
    "/v1/leases/{id}": {
        "put": operation(
            "Renew a lease; with `keeps` it keeps these, and no others",
            {"200": json_answer("The lease", _LEASE)} | errors("400", "404", "507"),
            parameters=[ID_IN_PATH],
            body=json_body({"type": "object", "properties": {"keeps": _KEEPS, "ttl_s": _TTL_S}}),
        ),
        "delete": operation(
            "End a lease",
            {"200": json_answer("Whether it was there", object_of(ended={"type": "boolean"}))} | errors("400"),
            parameters=[ID_IN_PATH],
        ),
    },
}

CHUNKS: dict[str, Operations] = {
    "/v1/chunks/{id}": {
        "get": operation(
            "One frame; immutable",
            {"200": {"description": "The frame", "content": binary(FRAMES)}} | errors("400", "404", "502", "508"),
            parameters=[ID_IN_PATH],
        )
    },
    "/v1/chunks/batch": {
        "post": operation(
            "Frames in the order of the ids; codec 255 and no payload for each one that is not here",
            {"200": {"description": "The frames", "content": binary(FRAMES)}} | errors("400", "502", "508"),
            body=ids_body(),
        )
    },
    "/v1/chunks/missing": {
        "post": operation(
            "Which of these chunks are not here",
            {"200": json_answer("Ids", object_of(missing=array(string(ID))))} | errors("400"),
            body=ids_body(),
        )
    },
    "/v1/chunks": {
        "put": operation(
            "Store frames; each is verified, the first wrong one ends the request, those before it stay",
            {"200": json_answer("How many", object_of(stored=NUMBER))} | errors("400", "403", "507"),
            body={"required": True, "content": binary(FRAMES)},
        )
    },
}

SERVER: dict[str, Operations] = {
    "/v1/openapi.json": {"get": operation("This document", {"200": {"description": "OpenAPI"}})},
    "/healthz": {"get": operation("The process answers", {"200": {"description": "ok"}})},
    "/readyz": {
        "get": operation(
            "Requests may come here; the store can be written, unless only reads are asked for",
            {"200": {"description": "ok"}} | errors("400", "503"),
            parameters=[in_query("for", "reads")],
        )
    },
    "/metrics": {
        "get": operation("What this server did, for Prometheus", {"200": {"description": "text format 0.0.4"}})
    },
}

PATHS = {**IMAGES, **SNAPSHOTS, **PROFILES, **JOBS, **LEASES, **CHUNKS, **SERVER}


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
        "paths": {path: _with_access(path, operations) for path, operations in PATHS.items()},
        "components": {
            "schemas": schemas(),
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "docs/auth.md; none without a token file"}
            },
        },
    }


def _with_access(path: str, operations: Operations) -> Operations:
    """With the scope that each takes, and the answers to who has not got it or asks too often."""
    found: Operations = {}
    for method, described in operations.items():
        need = ROUTES[method.upper(), path]
        if need is not Need.OPEN:
            refused = errors("401", "403", "415", "429") | (
                {"413": errors("413")["413"]} if "requestBody" in described else {}
            )
            described = {
                **described,
                "responses": {**described["responses"], **refused},
                "security": [{"token": []}],
                "x-scope": str(need.scope),
            }
        found[method] = described
    return found
