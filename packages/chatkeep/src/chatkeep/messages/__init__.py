"""Messages: models, conversions, merge by id, and what a model is sent.

Three forms of one conversation:

* **model messages** (:class:`chatkeep.records.ModelMessage`): what the engine and the stores use,
  one row per provider message;
* **UI messages**: what a browser paints, one bubble with ordered ``parts``;
* **wire rows**: AG-UI messages, in requests and in MESSAGES_SNAPSHOT.

No function here changes a message in place.
"""

from __future__ import annotations

from chatkeep.messages.ids import ensure_ids, new_message_id, stable_ids
from chatkeep.messages.ingest import Inbound, wire_to_model
from chatkeep.messages.merge import Merge, MergeKind, merge_messages
from chatkeep.messages.parts import (
    add_ui_resource,
    bag_of,
    compact_json,
    is_content_parts,
    is_placeholder,
    iso_time,
    parse_result,
    put_bag,
    text_of,
    ui_resource_key,
    ui_resource_part,
)
from chatkeep.messages.placing import before_each, placed
from chatkeep.messages.provider import NO_RESULT, provider_view
from chatkeep.messages.ui import (
    activity_message,
    interleave_activities,
    model_to_ui,
    ui_length,
    ui_to_model,
)
from chatkeep.messages.wire import activity_row, model_to_wire

__all__ = [
    "NO_RESULT",
    "Inbound",
    "Merge",
    "MergeKind",
    "activity_message",
    "activity_row",
    "add_ui_resource",
    "bag_of",
    "before_each",
    "compact_json",
    "ensure_ids",
    "interleave_activities",
    "is_content_parts",
    "is_placeholder",
    "iso_time",
    "merge_messages",
    "model_to_ui",
    "model_to_wire",
    "new_message_id",
    "parse_result",
    "placed",
    "provider_view",
    "put_bag",
    "stable_ids",
    "text_of",
    "ui_length",
    "ui_resource_key",
    "ui_resource_part",
    "ui_to_model",
    "wire_to_model",
]
