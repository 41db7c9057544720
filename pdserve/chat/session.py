"""Runs the conversation: lines and commands in, answers out, until the user leaves.

    waiting for a line --a message--> answering --whole, or Ctrl-C--> waiting, with the answer kept
                                          '--an error--> waiting, the message taken back
    waiting --Ctrl-D or /quit--> over

Python's readline edits lines, and the arrow keys call earlier lines back. Called by `chat.cli`.
"""

import io
import sys
from contextlib import closing
from pathlib import Path

from rich.console import Console

from pdserve.chat.conversation import Conversation
from pdserve.chat.screen import Answer, visible
from pdserve.chat.server import Server, ServerError
from pdserve.text.answers.pieces import Piece

HELP = """/help          show this list
/reset         forget the conversation, except the system message
/undo          forget your last message and its answer
/system TEXT   set the system message; without TEXT, remove it
/save FILE     write the conversation to a new file, as JSON
/quit          leave, as Ctrl-D does
A line that ends with \\ goes on in the next one. Write // to begin a message with /.
Ctrl-C stops an answer and keeps the part that has come."""


def run_once(server: Server, system: str | None, streams: bool) -> int:
    """Sends one message from stdin, and writes only its answer to stdout. Raises ServerError."""
    text = sys.stdin.read().strip()
    if not text:
        raise ValueError("the input is empty: write a message into the pipe")
    conversation = Conversation(system)
    conversation.say(text)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write half a surrogate pair
    answer = Answer(Console(file=sys.stdout, highlight=False), shows_reasoning=False)
    reason = ""
    try:
        for piece in server.answer(conversation.sent(), streams):
            if isinstance(piece, str):
                reason = piece
            else:
                answer.show(piece)
    finally:
        answer.end()
    if reason == "length":
        print("pdserve: the answer was cut off at the longest length allowed", file=sys.stderr)
    return 0


def run_terminal(server: Server, system: str | None, streams: bool) -> int:
    """Asks and answers until the user leaves."""
    return Session(server, Conversation(system), streams, Console(highlight=False)).run()


class Session:
    def __init__(
        self, server: Server, conversation: Conversation, streams: bool, console: Console
    ) -> None:
        self._server = server
        self._conversation = conversation
        self._streams = streams
        self._console = console

    def run(self) -> int:
        """Runs until the user leaves. Returns the exit status."""
        _edit_lines()
        self._note(f"{self._server.model} at {self._server.url}; /help lists commands.")
        while (text := self._read()) is not None:
            if text.startswith("/") and not text.startswith("//"):
                if not self._obey(text):
                    return 0
            elif text:
                self._say(text.removeprefix("/") if text.startswith("//") else text)
        return 0

    def _read(self) -> str | None:
        """Returns the next message or command, "" if there is none, None when the user leaves."""
        pending = self._conversation.pending
        prompt = f"result of {visible(pending[0]['function']['name'])}> " if pending else "> "
        lines: list[str] = []
        try:
            while True:
                line = input("... " if lines else prompt)
                if not line.endswith("\\"):
                    return "\n".join([*lines, line]).strip()
                lines.append(line[:-1])
        except KeyboardInterrupt:
            self._console.out()
            return ""
        except EOFError:
            self._console.out()
            return None

    def _say(self, text: str) -> None:
        """Sends a message and shows its answer."""
        self._conversation.say(text)
        if self._conversation.pending:  # other calls still need a result from the user
            return
        try:
            self._answer()
        except ServerError as error:
            self._conversation.take_back()
            self._note(f"{error} Your message was taken back.", "red")

    def _answer(self) -> None:
        pieces: list[Piece] = []
        ended = ""
        shown = Answer(self._console, shows_reasoning=True)
        try:
            with closing(self._server.answer(self._conversation.sent(), self._streams)) as coming:
                for piece in coming:
                    if isinstance(piece, str):
                        ended = piece
                    else:
                        pieces.append(piece)
                        shown.show(piece)
        except KeyboardInterrupt:
            ended = "stopped"
        finally:
            shown.end()
        if not self._conversation.hear(pieces):
            self._conversation.take_back()
            self._note("There is no answer; your message was taken back.")
        elif ended == "stopped":
            self._note("Stopped; the conversation goes on from here.")
        elif ended == "length":
            self._note("The answer was cut off at the longest length allowed.")

    def _obey(self, line: str) -> bool:
        """Runs a command. Returns False when the user leaves."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/quit" | "/exit":
                return False
            case "/help":
                self._note(HELP)
            case "/reset":
                self._conversation.reset()
                self._note("The conversation is forgotten.")
            case "/undo":
                text = self._conversation.undo()
                said = "There is nothing to take back." if text is None else f"Taken back: {text}"
                self._note(said)
            case "/system":
                self._conversation.system = rest or None
                self._note("The system message is set." if rest else "There is no system message.")
            case "/save":
                self._save(rest)
            case _:
                self._note(f"{name} is no command: /help lists them.")
        return True

    def _save(self, name: str) -> None:
        if not name:
            self._note("/save needs the name of a file.")
            return
        try:
            self._conversation.save(Path(name), self._server.model)
        except FileExistsError:
            self._note(f"{name} already exists: name a new file.")
        except (OSError, RuntimeError, ValueError) as error:
            self._note(f"It could not be saved: {error}.")
        else:
            self._note(f"Saved to {name}.")

    def _note(self, text: str, style: str = "dim") -> None:
        """Shows a remark of this program itself."""
        self._console.out(visible(text), style=style, highlight=False)


def _edit_lines() -> None:
    """Imports readline, which lets `input` edit lines. Pasted text is one message, and a tab is a
    tab."""
    import readline

    readline.parse_and_bind("set enable-bracketed-paste on")
    readline.parse_and_bind("tab: tab-insert")
