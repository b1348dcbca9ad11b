"""Chat templates: a model folder's Jinja text, rendered in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from terrazzo.checkpoint.small_files import is_present, read_text
from terrazzo.engine.folder import Document, read_json
from terrazzo.errors import ConfigError, MissingFileError, RequestError

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]

_FAULTS = (
    *(ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError),
    *(SyntaxError, TypeError, ValueError),
)
"""What else a template can raise: its expressions are those of Python, and it may call itself."""
LONGEST_PROMPT = 1 << 26
"""Characters that a template may write; ten times what the longest contexts hold."""
LARGEST_TEMPLATE = 1 << 20
"""Characters. The longest templates in use have a twentieth of it."""


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
            return _bounded(_environment().from_string(source).generate(given))
        except (TemplateError, *_FAULTS) as error:
            raise RequestError(
                f"the model's chat template cannot render these messages: {error}; check their "
                "roles, their order and their content"
            ) from error


def _bounded(pieces: Iterator[str]) -> str:
    """A template of few lines can write without end; no prompt is that long."""
    text: list[str] = []
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > LONGEST_PROMPT:
            raise ValueError(f"it writes more than {LONGEST_PROMPT} characters")
        text.append(piece)
    return "".join(text)


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
    if is_present(file):
        return {"default": read_text(file, LARGEST_TEMPLATE)}
    file = folder / "chat_template.json"
    document = read_json(file)
    if not document:
        file, document = folder / "tokenizer_config.json", tokenizer_config
    value = document.get("chat_template") or []
    named = {"default": value} if isinstance(value, str) else _named(value, file)
    for source in named.values():
        if len(source) > LARGEST_TEMPLATE:
            raise ConfigError(
                f"{file}: chat_template has {len(source)} characters; at most {LARGEST_TEMPLATE} "
                "are read. Write a shorter one to chat_template.jinja"
            )
    return named


def _named(value: object, file: Path) -> dict[str, str]:
    """Templates as a list of objects with `name` and `template`."""
    try:
        named = {each["name"]: each["template"] for each in value}  # type: ignore[attr-defined]
    except (TypeError, KeyError, AttributeError) as error:
        raise _malformed(file) from error
    if not all(isinstance(each, str) for pair in named.items() for each in pair):
        raise _malformed(file)
    return named


def _malformed(file: Path) -> ConfigError:
    return ConfigError(
        f"{file}: chat_template is malformed; legal is text, or a list of objects with the texts "
        "`name` and `template`. Correct it, or write the template to chat_template.jinja"
    )


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
