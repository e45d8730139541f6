"""Reading what W&B's client has written offline."""

import json
import struct

_BLOCK, _HEADER = 32768, 7


def records(path):
    """Yield the records of a file of W&B, a log in the format of LevelDB."""
    from wandb.proto import wandb_internal_pb2

    data, at, begun = path.read_bytes(), _HEADER, b""
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + _HEADER])
        begun += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (1, 4):  # whole, or the last of several pieces
            record = wandb_internal_pb2.Record()
            record.ParseFromString(begun)
            begun = b""
            yield record


def runs_in(folder):
    """Return name, rows, alerts and step metrics of each run that was written offline, by name."""
    import wandb

    wandb.teardown()
    found = {}
    for path in folder.rglob("*.wandb"):
        name, rows, alerts, metrics = "", [], [], {}
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                name = record.run.display_name or name
            elif kind == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
            elif kind == "alert":
                alerts.append((record.alert.title, record.alert.text))
            elif kind == "metric":
                metrics[record.metric.name] = record.metric.step_metric
        found[name] = rows, alerts, metrics
    return found
