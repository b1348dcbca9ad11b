"""Chat templates: a model folder's Jinja text, rendered in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from terrazzo.engine.folder import Document, read_json
from terrazzo.errors import MissingFileError, RequestError

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """source: Jinja text. tool_source: the one for conversations with tools, often the same.

    special_tokens: bos_token, eos_token, ... as the template's variables.
    """

    source: str
    tool_source: str
    special_tokens: Mapping[str, str]

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> str:
        """Raises RequestError when the template refuses or cannot digest the messages."""
        from jinja2 import TemplateError

        given = {
            **self.special_tokens,
            "messages": messages,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        source = self.tool_source if tools else self.source
        try:
            return _environment().from_string(source).render(given)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise RequestError(
                f"the model's chat template cannot render these messages: {error}; check their "
                "roles, their order and their content"
            ) from error


def read_template(folder: Path, tokenizer_config: Document) -> ChatTemplate:
    """chat_template.jinja, else chat_template.json, else tokenizer_config.json.

    Raises MissingFileError when none of them holds a template.
    """
    named = _templates(folder, tokenizer_config)
    source = named.get("default") or next(iter(named.values()), "")
    if not source:
        raise MissingFileError(
            f"{folder} has no chat template (chat_template.jinja, or `chat_template` in "
            "tokenizer_config.json); it is probably a base model: send plain text instead, or add "
            "a chat_template.jinja"
        )
    return ChatTemplate(source, named.get("tool_use", source), special_tokens(tokenizer_config))


def special_tokens(tokenizer_config: Document) -> dict[str, str]:
    """`bos_token`, `eos_token`, ... by name; written as text or as an object with `content`."""
    found: dict[str, str] = {}
    for key, value in tokenizer_config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found


def _templates(folder: Path, tokenizer_config: Document) -> dict[str, str]:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text(encoding="utf-8")}
    document = read_json(folder / "chat_template.json") or tokenizer_config
    value = document.get("chat_template") or []
    if isinstance(value, str):
        return {"default": value}
    return {each["name"]: each["template"] for each in value}


def _environment() -> ImmutableSandboxedEnvironment:
    """As model makers expect it: whitespace trimmed, loops that break, four helpers."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_extension()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _generation_extension() -> type:
    """`{% generation %}...{% endgeneration %}` marks text for training; here it is only text."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not contain."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
