"""The chat template of a published folder, which may have another one for rows with tools. No jax here."""

from pathlib import Path


def read_template(folder: Path) -> str:
    """Returns chat_template.jinja of a folder, joined with the template for rows with tools if there is one."""
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    tool_use = folder / "additional_chat_templates" / "tool_use.jinja"
    return with_tool_use(template, tool_use.read_text(encoding="utf-8")) if tool_use.is_file() else template


def with_tool_use(default: str, tool_use: str | None) -> str:
    """Returns a template that writes rows with tools as `tool_use` does, and the others as `default` does."""
    if tool_use is None:
        return default
    # Jinja leaves out the line end after a tag and the one that ends a template; + keeps the spaces before a tag.
    default = default.removesuffix("\n")
    tool_use = tool_use.removesuffix("\n")
    return f"{{%+ if tools %}}\n{tool_use}{{%+ else %}}\n{default}{{%+ endif %}}"
