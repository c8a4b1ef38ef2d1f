"""Which fields a body may have is read from the application's classes. test_model_openai.py reads those of the real vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Annotated, Any, ClassVar

from triton_vllm.vllm_api.bodies import BodyType, body_types


class Text:
    """As pydantic's classes are: with fields, some of which have other names in JSON."""

    model_fields: ClassVar[dict[str, Any]] = {
        "prompt": SimpleNamespace(alias=None, validation_alias=None),
        "json_schema": SimpleNamespace(alias="schema", validation_alias="schema"),
        "n": SimpleNamespace(alias=None, validation_alias=SimpleNamespace(choices=["count", SimpleNamespace(path=["how", 0])])),
    }


class Chat:
    """Another one, with errors."""

    model_fields: ClassVar[dict[str, Any]] = {"messages": SimpleNamespace(alias=None, validation_alias=None)}
    raises: Exception | None = None

    @classmethod
    def model_validate(cls, body: dict[str, Any]) -> None:
        """Change the body, as some of vLLM's checks do, and raise what it is told to raise."""
        body["messages"] = None
        if cls.raises:
            raise cls.raises


def route(path: str, hint: Any) -> Any:
    """Return a route of FastAPI's with a body of this type."""
    return SimpleNamespace(path=path, body_field=SimpleNamespace(field_info=SimpleNamespace(annotation=hint)))


def test_the_fields_are_those_of_all_classes_of_a_path():
    """With their aliases, of unions, and of applications within the application."""
    inner = SimpleNamespace(path="/v2", routes=[route("/b", Annotated[Text | Chat, "x"])])
    routes = [
        route("/a", Text),
        inner,
        route("/c", dict[str, Any]),
        SimpleNamespace(path="/d", body_field=None),
        SimpleNamespace(),
    ]
    found = body_types(SimpleNamespace(routes=routes))
    names = {"prompt", "json_schema", "schema", "n", "count", "how"}
    assert {path: body.fields for path, body in found.items()} == {"/a": names, "/v2/b": names | {"messages"}}
    assert found["/v2/b"].classes == (Text, Chat)


def test_errors_are_counted(monkeypatch):
    """Of the class with the fewest; the body stays as it is."""
    body: dict[str, Any] = {"messages": []}
    kind = BodyType((Chat,), frozenset())
    assert kind.errors(body) == 0
    error: Any = ValueError("wrong")
    for raised, count in ((error, 1), (TypeError("a fault of a check"), 1)):
        monkeypatch.setattr(Chat, "raises", raised)
        assert kind.errors(body) == count
    error.error_count = lambda: 233
    monkeypatch.setattr(Chat, "raises", error)
    assert kind.errors(body) == 233
    fine = SimpleNamespace(model_validate=lambda body: None)
    assert BodyType((Chat, fine), frozenset()).errors(body) == 0
    assert body == {"messages": []}
