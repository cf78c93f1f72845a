"""The words of a command in a shell script: variables, arrays, defaults and simple conditions, nothing is ever
executed.

Published launch scripts put their options into variables and arrays (``ARGS=(--a 1)``, ``ARGS="--a 1"``,
``ARGS+=(…)``) and name them in one command. Conditions on strings (``[[ $A == b ]]``, ``-n``, ``-z``, joined by
``||`` and ``&&``) are decided; what cannot be told (a command's output, an argument of the script) is an empty word.
"""

from __future__ import annotations

import re
import shlex

from shardwright.exchange.configuration import ConfigurationError

_ASSIGN = re.compile(r"^\s*(?:export\s+|declare\s+(?:-\w+\s+)*|local\s+)?([A-Za-z_]\w*)(\+?)=(.*)$", re.S)
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?:(:?[-=])([^}]*))?\}|\$(\w+)|\$[@*#?]")
_SUM = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_OUTPUT = re.compile(r"\$\([^()]*\)|`[^`]*`")


def command_words(text: str, source: str) -> list[str]:
    """The words of the last command of a script that names a Python file (``torchrun … pretrain_gpt.py --a 1``); all
    words of a text without one.

    >>> command_words("N=2\\nA=(--size $N)\\ntorchrun run.py ${A[@]}", "x.sh")
    ['torchrun', 'run.py', '--size', '2']
    """
    variables: dict[str, str] = {}
    found: list[str] = []
    every: list[str] = []
    open_ifs: list[list[bool]] = []  # [this branch is taken, some branch was]
    for line in _statements(text):
        word = line.split(None, 1)[0] if line.split() else ""
        if word in ("if", "elif", "else", "fi"):
            _branch(word, line, open_ifs, variables)
            continue
        if not all(taken for taken, _ in open_ifs):
            continue
        assigned = _ASSIGN.match(line)
        if assigned and not _continues(assigned[3]):
            name, more, value = assigned.groups()
            value = value.strip()
            words = _words(value[1:-1] if value.startswith("(") and value.endswith(")") else value, variables, source)
            variables[name] = " ".join([variables.get(name, ""), *words] if more else words).strip()
            continue
        words = _words(line, variables, source)
        every += words
        if any(one.endswith(".py") for one in words) and words[0] not in ("[", "[[", "echo", "cp", "mkdir"):
            found = words
    return found or every


def _statements(text: str) -> list[str]:
    """Lines put together that belong together: continued ones, open quotes, open parentheses."""
    found: list[str] = []
    open_line = ""
    for raw in text.splitlines():
        line = _without_comment(raw, _inside_quotes(open_line))
        open_line = f"{open_line}\n{line}" if open_line else line
        if line.rstrip().endswith("\\"):
            open_line = open_line.rstrip()[:-1]
            continue
        if _inside_quotes(open_line) or _depth(open_line) > 0:
            continue
        found += [one.strip() for one in [open_line] if one.strip()]
        open_line = ""
    return [*found, open_line.strip()] if open_line.strip() else found


def _without_comment(line: str, quoted: str) -> str:
    quote = quoted
    for place, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and (place == 0 or line[place - 1].isspace()):
            return line[:place]
    return line


def _inside_quotes(text: str) -> str:
    """The quote that is open at the end of a text."""
    quote = ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
    return quote


def _depth(text: str) -> int:
    plain = re.sub(r"'[^']*'|\"[^\"]*\"", "", text)
    return plain.count("(") - plain.count(")")


def _continues(value: str) -> bool:
    """Whether an assignment only stands before a command (``A=1 torchrun x.py``)."""
    value = value.strip()
    if value.startswith("("):
        return False
    rest = re.sub(
        r"^(?:'[^']*'|\"[^\"]*\"|\$\(\(.*?\)\)|\$\([^)]*\)|\$\{[^}]*\}|[^\s])+", "", value, count=1, flags=re.S
    )
    return bool(rest.strip())


def _expanded(text: str, variables: dict[str, str]) -> str:
    def one(match: re.Match[str]) -> str:
        name = match[1] or match[4] or ""
        value = variables.get(name, "")
        return value if value or match[3] is None else match[3].strip("'\"")

    for _ in range(4):  # variables that name variables
        text = _VARIABLE.sub(one, text)
        text = _SUM.sub(lambda match: _computed(match[1], variables), text)
    return _OUTPUT.sub("", text)


def _computed(text: str, variables: dict[str, str]) -> str:
    """A sum, product or quotient of whole numbers; nothing for anything else."""
    said = re.sub(r"[A-Za-z_]\w*", lambda match: variables.get(match[0], "") or "0", text)
    tokens = re.findall(r"\d+|[-+*/()]", said)
    if "".join(tokens) != re.sub(r"\s+", "", said):
        return ""
    value = _Sums(tokens).sum()
    return "" if value is None else str(value)


class _Sums:
    """Whole numbers, + - * / and parentheses, by recursive descent."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens[::-1]

    def sum(self) -> int | None:
        value = self.product()
        while value is not None and self.tokens and self.tokens[-1] in "+-":
            sign, other = self.tokens.pop(), self.product()
            value = None if other is None else value + other if sign == "+" else value - other
        return value

    def product(self) -> int | None:
        value = self.number()
        while value is not None and self.tokens and self.tokens[-1] in "*/":
            sign, other = self.tokens.pop(), self.number()
            value = (
                None
                if other is None or (sign == "/" and not other)
                else value * other
                if sign == "*"
                else value // other
            )
        return value

    def number(self) -> int | None:
        token = self.tokens.pop() if self.tokens else ""
        if token == "(":
            value = self.sum()
            if self.tokens and self.tokens[-1] == ")":
                self.tokens.pop()
            return value
        return int(token) if token.isdigit() else None


def _words(text: str, variables: dict[str, str], source: str) -> list[str]:
    try:
        parts = shlex.split(_expanded(text.replace("\\\n", " "), variables), comments=False)
    except ValueError as problem:
        raise ConfigurationError(
            f"{source} is no script that can be read: {problem}.", "Write the command in one line."
        ) from None
    words: list[str] = []
    for part in parts:  # "--split 99,1" in quotes is two words where it is named without them
        words += part.split() if part.lstrip().startswith("--") else [part]
    return [word for word in words if word != "\\"]


def _branch(word: str, line: str, open_ifs: list[list[bool]], variables: dict[str, str]) -> None:
    condition = re.sub(r";?\s*then\s*$", "", line[len(word) :].strip())
    if word == "if":
        holds = _holds(condition, variables)
        open_ifs.append([holds, holds])
    elif word == "fi":
        if open_ifs:
            open_ifs.pop()
    elif open_ifs:
        holds = not open_ifs[-1][1] and (word == "else" or _holds(condition, variables))
        open_ifs[-1] = [holds, open_ifs[-1][1] or holds]


def _holds(condition: str, variables: dict[str, str]) -> bool:
    return any(all(_test(part, variables) for part in either.split("&&")) for either in condition.split("||"))


def _test(text: str, variables: dict[str, str]) -> bool:
    said = re.sub(r"^\[\[?|\]\]?$", "", text.strip()).strip()
    try:
        words = shlex.split(_expanded(said, variables))
    except ValueError:
        return False
    if len(words) == 3 and words[1] in ("==", "=", "!=", "-eq", "-ne", "-gt"):
        if words[1] == "-gt":
            return words[0].isdigit() and words[2].isdigit() and int(words[0]) > int(words[2])
        return (words[0] == words[2]) == (words[1] in ("==", "=", "-eq"))
    if words and words[0] in ("-n", "-z"):
        return (len(words) > 1 and bool(words[1])) == (words[0] == "-n")
    return False
