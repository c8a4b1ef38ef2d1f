"""Sends shots to a server and judges its replies."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import grpc  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from support.fuzz import GRPC

if TYPE_CHECKING:
    from support.fuzz import Shot
    from vllm_env.serve.server import TritonServer

REPLY_SECONDS = 120.0
LONGEST_ERROR = 600
"""Characters: ours are of at most 500, and Triton puts some before them."""
UNDOCUMENTED = ("the request could not be read", "the engine failed on this request")
"""What a client is told of a fault of ours: no request may bring one about."""
INTERNALS = ("Traceback", "NoneType", "object at 0x", ".py", "site-packages", "triton_vllm", "<class", "KeyError", "/root")


class Target:
    """A server under fire; one thread's, since it holds a connection of each kind."""

    def __init__(self, server: TritonServer) -> None:
        self._http = http.client.HTTPConnection(urlsplit(server.http_url).netloc, timeout=REPLY_SECONDS)
        self._channel = grpc.insecure_channel(server.grpc_url, options=[("grpc.use_local_subchannel_pool", 1)])
        self._stream = self._channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=bytes,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()
        self._channel.close()

    def fault(self, shot: Shot) -> str:
        """Send a shot; return what is wrong with the reply, or nothing for an answer or an error that is fit to be shown."""
        errors, answers = self._over_grpc(shot) if shot.way == GRPC else self._over_http(shot)
        if not errors and not answers:  # what is no message ends a stream like a client that has no more to say
            return "no reply" if is_message(shot) else ""
        faults = [fault for fault in map(fault_of_error, errors) if fault]
        return "; ".join(faults)

    def _over_grpc(self, shot: Shot) -> tuple[list[str], int]:
        errors, answers = [], 0
        try:
            for response in self._stream(iter([shot.body]), timeout=REPLY_SECONDS):
                if response.error_message:
                    errors.append(response.error_message)
                else:
                    answers += 1
        except grpc.RpcError as error:
            errors.append(f"{error.code().name}: {error.details()}")
        return errors, answers

    def _over_http(self, shot: Shot) -> tuple[list[str], int]:
        self._http.request("POST", shot.way, shot.body, {"Content-Type": "application/json"})
        answer = self._http.getresponse()
        text = answer.read().decode("utf-8", "replace")
        if answer.will_close:
            self._http.close()
        events = [line.partition(":")[2] for line in text.splitlines() if line.startswith("data:")] or [text]
        errors, answers = [], 0
        for event in events:
            try:
                found = json.loads(event, parse_constant=_no_number)
            except ValueError as error:
                return [f"Traceback of a parser, {error}: {answer.status} {event[:200]}"], 0
            if "error" in found:
                errors.append(str(found["error"]))
            elif answer.status == 200:
                answers += 1
        return errors, answers


def is_message(shot: Shot) -> bool:
    """Return whether the bytes can be read as far as to know that they are a request."""
    try:
        service_pb2.ModelInferRequest.FromString(shot.body)
    except DecodeError:
        return False
    return True


def fault_of_error(error: str) -> str:
    """Return what is wrong with the text of an error, or nothing."""
    if not error.strip():
        return "an empty error"
    if len(error) > LONGEST_ERROR:
        return f"an error of {len(error)} characters: {error[:200]}"
    if error.startswith(("DEADLINE_EXCEEDED", "UNAVAILABLE:")):
        return f"no reply: {error}"
    found = [word for word in (*INTERNALS, *UNDOCUMENTED) if word in error]
    return f"{found[0]} in an error: {error}" if found else ""


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
