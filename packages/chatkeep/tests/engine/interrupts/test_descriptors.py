"""Descriptors and bindings are the ones that the recorded engine and the browser agree on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkeep.engine.interrupts import (
    BINDING_KEY,
    BOUNDARY_KEY,
    PAYLOAD_KEY,
    PROOF_KEY,
    Batch,
    Decision,
    approval_descriptor,
    approval_proof,
    client_tool_descriptor,
    define_interrupt,
    generic_descriptor,
    is_descriptor,
    owned,
    parse_binding,
    parse_proof,
    schema_hash,
)
from chatkeep.engine.tools import Tool, client_tool, define_tool
from chatkeep.errors import ToolError

GOLDEN = Path(__file__).parent.parent / "golden"
NO_SCHEMA = "sha256:eb045d78d273107348b0300c01d29b7552d622abbc6faf81b3ec55359aa9950c"
P_SCHEMA = {"type": "object", "properties": {"p": {"type": "string"}}}
N_SCHEMA = {"type": "object", "properties": {"n": {"type": "string"}}}


def server(name: str = "del", **options: Any) -> Tool:
    return define_tool(name=name, execute=lambda args: args, needs_approval=True, **options)


def recorded_interrupts() -> dict[str, list[dict[str, Any]]]:
    """The interrupts of each pause of the recording, by the title of its section."""
    out: dict[str, list[dict[str, Any]]] = {}
    title = ""
    for line in (GOLDEN / "trace-j.txt").read_text().splitlines():
        if line.startswith("=== "):
            title = line[4:]
        elif line.startswith('{"type":"RUN_FINISHED"') and line.endswith("}"):
            outcome = json.loads(line).get("outcome") or {}
            out[title] = outcome.get("interrupts", [])
    return out


def branches_of(tool: Tool) -> list[dict[str, Any]]:
    branches: list[dict[str, Any]] = approval_descriptor(tool, "c1", {}, "r1")["responseSchema"][
        "oneOf"
    ]
    return branches


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("none", {}),
        ("raw input", {"input_schema": P_SCHEMA}),
        (
            "branches",
            {"input_schema": {"type": "object"}, "approval_schema": {"approve": N_SCHEMA}},
        ),
        ("single", {"input_schema": {"type": "object"}, "approval_schema": N_SCHEMA}),
    ],
)
def test_approvals_have_the_recorded_schema_and_hashes(case: str, options: dict[str, Any]) -> None:
    lines = (GOLDEN / "trace-c.txt").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"approval {case} "))
    recorded = json.loads(line.removeprefix(f"approval {case} "))
    descriptor = approval_descriptor(server(**options), "c1", {}, "r1")
    binding = descriptor["metadata"][BINDING_KEY]
    assert json.dumps(descriptor["responseSchema"]) == json.dumps(recorded["responseSchema"])
    assert binding["responseSchemaHash"] == recorded["responseSchemaHash"]
    assert binding["approvalSchemaHash"] == recorded["approvalSchemaHash"]


def test_the_approval_of_an_email_has_the_known_hashes() -> None:
    schema = {
        "type": "object",
        "properties": {"to": {"type": "string"}, "subject": {"type": "string"}},
        "required": ["to", "subject"],
        "additionalProperties": False,
    }
    tool = server("send_email", input_schema=schema)
    args = {"to": "ada@example.com", "subject": "Hi"}
    assert approval_descriptor(tool, "c1", args, "run-1") == {
        "id": "approval_c1",
        "reason": "tool_call",
        "message": "Approval required to run send_email",
        "toolCallId": "c1",
        "responseSchema": {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"approved": {"const": True}, "editedArgs": schema},
                    "required": ["approved"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {"approved": {"const": False}},
                    "required": ["approved"],
                    "additionalProperties": False,
                },
            ]
        },
        "metadata": {
            "kind": "approval",
            "toolName": "send_email",
            "input": args,
            "tanstack:interruptBinding": {
                "v": 1,
                "kind": "tool-approval",
                "interruptId": "approval_c1",
                "toolName": "send_email",
                "toolCallId": "c1",
                "originalArgs": args,
                "inputSchemaHash": "sha256:"
                "e8c3c38ac148dedf4d54441277bf5359f83b76fae01c2c32eabaf431bbcc8fb5",
                "approvalSchemaHash": "sha256:"
                "22f76d9a1c618a3cfaa891208a14f6e5e6ab1be4ff1c38cc8a8cd1e8fd0c0e4e",
                "responseSchemaHash": "sha256:"
                "6d9fd4b5d4b5be637af995fb4aef21338247b00a58ffede2e104b4b7e694eab3",
                "interruptedRunId": "run-1",
                "generation": 0,
            },
        },
    }


def test_a_browser_tool_without_an_output_schema_is_the_recorded_one() -> None:
    """The same call, approved first, waits in the recording."""
    recorded = recorded_interrupts()["client approved"]
    assert [client_tool_descriptor(client_tool("ac"), "q1", {}, "r2")] == recorded
    assert recorded[0]["responseSchema"] == {}


def test_a_browser_tool_carries_its_output_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    descriptor = client_tool_descriptor(
        client_tool("get_location", output_schema=schema), "c1", {"accuracy": "high"}, "r1"
    )
    binding = descriptor["metadata"][BINDING_KEY]
    assert descriptor["responseSchema"] == schema
    assert binding["outputSchemaHash"] == binding["responseSchemaHash"] == schema_hash(schema)
    assert binding["outputSchemaHash"] == (
        "sha256:5f118feb63f080e5bd34bc71f32b2e9efba28cc852774cb88f549245301bb7b7"
    )


def test_a_generic_question_is_the_recorded_one() -> None:
    (recorded,) = recorded_interrupts()["mixed afterModel"]
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    definition = define_interrupt("plan", response=schema)
    request = definition.request(key="k", reason="review", message="m")
    assert generic_descriptor(request, 0, recorded["id"], "r1") == recorded


def test_a_generic_question_shows_its_payload() -> None:
    definition = define_interrupt(
        "review-plan",
        response={
            "type": "object",
            "properties": {"approved": {"type": "boolean"}},
            "required": ["approved"],
            "additionalProperties": False,
        },
        payload={
            "type": "object",
            "properties": {"title": {"type": "string"}},
            "required": ["title"],
            "additionalProperties": False,
        },
    )
    request = definition.request(
        key="initial-plan",
        reason="review-required",
        message="Review the proposed plan.",
        payload={"title": "Release plan"},
        expires_at=1_796_041_110_680,
    )
    descriptor = generic_descriptor(request, 2, "interrupt-1", "r1")
    assert descriptor["metadata"] == {
        PAYLOAD_KEY: {"title": "Release plan"},
        BINDING_KEY: {
            "v": 1,
            "kind": "generic",
            "interruptId": "interrupt-1",
            "definitionId": "review-plan",
            "key": "initial-plan",
            "batchIndex": 2,
            "responseSchemaHash": "sha256:"
            "f111104f51bda2c26e17d6938191c0b2bceec42124a9a748e12ae697ffce8190",
            "payloadSchemaHash": "sha256:"
            "c0f00621ba42dc1169cada464288b7e72467105c72f48a996833673ce4435390",
            "expiresAt": "2026-11-30T12:18:30.680Z",
            "interruptedRunId": "r1",
            "generation": 0,
        },
    }
    assert descriptor["expiresAt"] == "2026-11-30T12:18:30.680Z"


def test_a_question_says_where_it_was_asked_beside_its_binding() -> None:
    """Browsers compare what is in the binding; a mark of ours stays outside of it."""
    request = define_interrupt("free").request(key="k", reason="r", message="m")
    plain = generic_descriptor(request, 0, "i", "r1")
    placed = generic_descriptor(request, 0, "i", "r1", boundary="afterModel")
    assert placed["metadata"] == {**plain["metadata"], BOUNDARY_KEY: "afterModel"}
    batch = Batch("r1")
    batch.generic(request, "i", boundary="beforeTools")
    assert batch.descriptors()[0]["metadata"][BOUNDARY_KEY] == "beforeTools"


def test_nothing_absent_is_null() -> None:
    bare = define_interrupt("free").request(key="k", reason="r", message="m")
    for descriptor in (
        approval_descriptor(server(), "c1", {}, "r1"),
        client_tool_descriptor(client_tool("ac"), "c1", {}, "r1"),
        generic_descriptor(bare, 0, "i", "r1"),
    ):
        assert "null" not in json.dumps(descriptor)
    assert generic_descriptor(bare, 0, "i", "r1") == {
        "id": "i",
        "reason": "r",
        "message": "m",
        "metadata": {
            BINDING_KEY: {
                "v": 1,
                "kind": "generic",
                "interruptId": "i",
                "definitionId": "free",
                "key": "k",
                "batchIndex": 0,
                "interruptedRunId": "r1",
                "generation": 0,
            }
        },
    }


def test_a_browser_knows_every_descriptor_as_its_own() -> None:
    """What a browser checks before it shows an answer form: version, ids, run, generation, and
    that the schema on the wire has the hash of the binding."""
    batch = Batch("r1")
    batch.approval(server(input_schema=P_SCHEMA), "c1", {"p": "x"})
    batch.client_tool(client_tool("cli", output_schema=N_SCHEMA), "c2", {})
    definition = define_interrupt("plan", response=N_SCHEMA)
    batch.generic(definition.request(key="k", reason="r", message="m"))
    for descriptor in batch.descriptors():
        raw = descriptor["metadata"][BINDING_KEY]
        assert raw["v"] == 1
        assert raw["generation"] == 0
        assert raw["interruptId"] == descriptor["id"]
        assert raw["interruptedRunId"] == "r1"
        assert raw["responseSchemaHash"] == schema_hash(descriptor["responseSchema"])


def test_precomputed_hashes_stand_for_the_schemas() -> None:
    """A browser whose tool is defined by a validator library exports another schema."""
    tool = client_tool(
        "cli",
        input_schema=P_SCHEMA,
        output_schema=N_SCHEMA,
        needs_approval=True,
        input_schema_hash="sha256:in",
        output_schema_hash="sha256:out",
    )
    approval = approval_descriptor(tool, "c1", {}, "r1")["metadata"][BINDING_KEY]
    waiting = client_tool_descriptor(tool, "c1", {}, "r1")["metadata"][BINDING_KEY]
    assert approval["inputSchemaHash"] == "sha256:in"
    assert waiting["outputSchemaHash"] == "sha256:out"
    assert waiting["responseSchemaHash"] == schema_hash(N_SCHEMA)
    assert approval_descriptor(server(), "c1", {}, "r1")["metadata"][BINDING_KEY][
        "inputSchemaHash"
    ] == (NO_SCHEMA)


@pytest.mark.parametrize(
    ("schema", "branches"),
    [
        (None, (None, None)),
        ({}, ({}, {})),
        (N_SCHEMA, (N_SCHEMA, N_SCHEMA)),
        ({"approve": N_SCHEMA}, (N_SCHEMA, None)),
        ({"reject": N_SCHEMA}, (None, N_SCHEMA)),
        ({"approve": N_SCHEMA, "reject": P_SCHEMA}, (N_SCHEMA, P_SCHEMA)),
        ({"approve": N_SCHEMA, "reject": None}, (N_SCHEMA, None)),
    ],
)
def test_one_approval_schema_means_both_answers(
    schema: dict[str, Any] | None, branches: tuple[Any, Any]
) -> None:
    tool = server(approval_schema=schema)
    assert tool.approval_branches == branches
    for branch, described in zip(branches, branches_of(tool), strict=True):
        assert described["properties"].get("payload") == branch
        assert ("payload" in described["required"]) is (branch is not None)


@pytest.mark.parametrize("schema", [{"approve": 1}, {"reject": "x"}, {"type": 7}])
def test_an_approval_schema_that_is_none_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ToolError, match="approval_schema of tool del"):
        server(approval_schema=schema)


# ------------------------------------------------------------------------------- the batch


def test_a_batch_orders_approvals_client_tools_and_questions() -> None:
    definition = define_interrupt("plan")
    batch = Batch("r1")
    batch.generic(definition.request(key="a", reason="r", message="m"))
    batch.client_tool(client_tool("cli"), "k1", {})
    batch.generic(definition.request(key="b", reason="r", message="m"))
    batch.approval(server(), "d1", {})
    assert len(batch) == 4
    descriptors = batch.descriptors()
    assert [d["id"] for d in descriptors[:2]] == ["approval_d1", "client_tool_k1"]
    bindings = [parse_binding(d) for d in descriptors]
    assert [(b.key, b.batch_index) for b in bindings[2:] if b] == [("a", 2), ("b", 3)]
    assert len({d["id"] for d in descriptors}) == 4
    assert [d["id"] for d in batch.descriptors()] == [d["id"] for d in descriptors]


def test_a_batch_refuses_one_id_twice() -> None:
    request = define_interrupt("plan").request(key="a", reason="r", message="m")
    batch = Batch("r1")
    batch.approval(server(), "d1", {})
    batch.client_tool(client_tool("cli"), "d1", {})
    batch.generic(request, "mine")
    with pytest.raises(ToolError, match="'approval_d1'"):
        batch.approval(server(), "d1", {})
    with pytest.raises(ToolError, match="'client_tool_d1'"):
        batch.client_tool(client_tool("cli"), "d1", {})
    with pytest.raises(ToolError, match="'mine'"):
        batch.generic(request, "mine")
    assert len(batch) == len(batch.descriptors()) == 3


def test_a_batch_takes_requests_only() -> None:
    not_one: Any = {"key": "k"}
    with pytest.raises(ToolError, match=r"definition\.request"):
        Batch("r1").generic(not_one)


def test_an_empty_batch_is_false() -> None:
    assert not Batch("r1")
    assert Batch("r1").descriptors() == []


# -------------------------------------------------------------------------------- bindings


def test_bindings_are_read_back() -> None:
    approval = parse_binding(approval_descriptor(server(), "c1", {"p": None}, "r1"))
    assert approval is not None
    assert approval.kind == "tool-approval"
    assert approval.original_args == {"p": None}
    assert approval.interrupted_run_id == "r1"
    assert approval.input_schema_hash == NO_SCHEMA
    waiting = parse_binding(client_tool_descriptor(client_tool("cli"), "c1", {}, "r1"))
    assert waiting is not None
    assert (waiting.kind, waiting.tool_name) == ("client-tool-execution", "cli")
    assert waiting.batch_index == -1


BINDINGS = [
    approval_descriptor(server(), "c1", {}, "r1"),
    client_tool_descriptor(client_tool("cli"), "c1", {}, "r1"),
    generic_descriptor(
        define_interrupt("plan").request(key="k", reason="r", message="m"), 0, "g", "r1"
    ),
]
JUNK = st.sampled_from([None, True, 1, 1.5, "", [], {}, [1], {"a": 1}])


@pytest.mark.parametrize("descriptor", BINDINGS, ids=lambda d: d["id"])
def test_a_binding_without_one_of_its_words_is_none(descriptor: dict[str, Any]) -> None:
    binding = descriptor["metadata"][BINDING_KEY]
    for key in binding.keys() - {"batchIndex"}:
        rest = {k: v for k, v in binding.items() if k != key}
        changed = {**descriptor, "metadata": {BINDING_KEY: rest}}
        assert parse_binding(changed) is None, key


def test_a_question_without_a_place_is_read_with_none() -> None:
    descriptor = BINDINGS[2]
    binding = descriptor["metadata"][BINDING_KEY]
    for place in ("0", None, True, 1.0):
        changed = {**descriptor, "metadata": {BINDING_KEY: {**binding, "batchIndex": place}}}
        parsed = parse_binding(changed)
        assert parsed is not None
        assert parsed.batch_index == -1


@given(st.sampled_from(BINDINGS), st.data())
def test_wrong_types_in_a_binding_are_no_binding_and_no_error(
    descriptor: dict[str, Any], data: st.DataObject
) -> None:
    binding = dict(descriptor["metadata"][BINDING_KEY])
    key = data.draw(st.sampled_from(sorted(binding)))
    binding[key] = data.draw(JUNK)
    parsed = parse_binding({**descriptor, "metadata": {BINDING_KEY: binding}})
    if isinstance(binding[key], str):
        return
    if key in ("originalArgs", "batchIndex"):
        assert parsed is not None
    elif key == "generation":
        assert (parsed is not None) is (binding[key] == 1 and binding[key] is not True)
    elif key != "v" or binding[key] != 1 or binding[key] is True:
        assert parsed is None


@given(st.recursive(JUNK, lambda inner: st.dictionaries(st.text(), inner)))
def test_junk_in_place_of_metadata_is_no_binding(metadata: Any) -> None:
    assert parse_binding({"id": "i", "reason": "r", "message": "m", "metadata": metadata}) is None
    for marks in ({BINDING_KEY: metadata}, {PROOF_KEY: metadata}):
        assert parse_binding({"metadata": marks}) is None
        assert parse_proof({"metadata": marks}) is None


# ------------------------------------------------------------------------------- ownership

FOREIGN = {"id": "i", "reason": "r", "message": "m"}


@pytest.mark.parametrize(
    ("descriptor", "ours"),
    [
        (FOREIGN, False),
        ({**FOREIGN, "metadata": {}}, False),
        ({**FOREIGN, "metadata": {"kind": "other"}}, False),
        ({**FOREIGN, "metadata": {"kind": ["approval"]}}, False),
        ({**FOREIGN, "metadata": "text"}, False),
        ({**FOREIGN, "toolCallId": 1}, False),
        ({**FOREIGN, "toolCallId": "c1"}, True),
        ({**FOREIGN, "metadata": {"kind": "approval"}}, True),
        ({**FOREIGN, "metadata": {"kind": "client_tool"}}, True),
        ({**FOREIGN, "metadata": {BINDING_KEY: None}}, True),
        ({}, True),
        ({"id": "i", "reason": "r"}, True),
        ({"id": 1, "reason": "r", "message": "m"}, True),
        ({"anything": "opaque"}, True),
    ],
)
def test_only_a_whole_descriptor_without_our_marks_is_foreign(
    descriptor: dict[str, Any], *, ours: bool
) -> None:
    assert owned(descriptor) is ours


def test_a_descriptor_is_three_texts() -> None:
    assert is_descriptor(FOREIGN)
    wrong: list[Any] = [None, 1, "x", [], {}, {**FOREIGN, "message": 1}]
    for junk in wrong:
        assert not is_descriptor(junk)


# ----------------------------------------------------------------------------------- proofs


def test_a_proof_names_the_approval_its_schemas_and_the_decision() -> None:
    tool = client_tool("ac", input_schema=P_SCHEMA, needs_approval=True)
    asked = approval_descriptor(tool, "q1", {"p": "a"}, "r1")
    decision = Decision(approved=True, edited_args={"p": "b"})
    proof = approval_proof(asked, decision)
    decision = Decision(approved=True, edited_args={"p": "b"}, proof=proof)
    descriptor = client_tool_descriptor(tool, "q1", {"p": "b"}, "r2", decision=decision)
    binding = asked["metadata"][BINDING_KEY]
    assert parse_proof(descriptor) == {
        "v": 1,
        "interruptId": "approval_q1",
        "interruptedRunId": "r1",
        "generation": 0,
        "toolName": "ac",
        "toolCallId": "q1",
        "inputSchemaHash": binding["inputSchemaHash"],
        "approvalSchemaHash": binding["approvalSchemaHash"],
        "responseSchemaHash": binding["responseSchemaHash"],
        "decision": {"approved": True, "editedArgs": {"p": "b"}},
    }
    assert parse_binding(descriptor) is not None
    without = client_tool_descriptor(tool, "q1", {"p": "b"}, "r2")
    assert PROOF_KEY not in without["metadata"]
