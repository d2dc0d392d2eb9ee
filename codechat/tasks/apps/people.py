"""Contacts and mail."""

from __future__ import annotations

from typing import Literal

from codechat.tasks.apps.app import App
from codechat.tasks.apps.store import AppError, Row

Folder = Literal["inbox", "sent", "archive", "spam", "trash"]


class Contacts(App):
    """People with phone, address, birthday and circle."""

    table, key = "contacts", "name"

    def list(self) -> list[Row]:
        """All contacts"""
        return self._find("")

    def search(self, query: str) -> list[Row]:
        """Find contacts by name"""
        return self._find(query)

    def get(self, id: int) -> Row:
        """Show a contact"""
        return self._shown(id)

    def add(self, name: str, phone: str, email: str = "") -> int:
        """Add a contact"""
        return self.store.insert("contacts", name=name, phone=phone, email=email)

    def delete(self, id: int) -> str:
        """Delete a contact"""
        return self._remove(id)

    def rename(self, id: int, name: str) -> str:
        """Rename a contact"""
        return self._set(id, name=name)

    def set_phone(self, id: int, phone: str) -> str:
        """Change a phone number"""
        return self._set(id, phone=phone)

    def set_email(self, id: int, email: str) -> str:
        """Change a mail address"""
        return self._set(id, email=email)

    def set_birthday(self, id: int, day: str) -> str:
        """Change a birthday"""
        return self._set(id, birthday=day)

    def set_circle(self, id: int, circle: str) -> str:
        """Put a contact into a circle"""
        return self._set(id, circle=circle)

    def count(self) -> int:
        """Number of contacts"""
        return self._count()


class Mail(App):
    """Mails in folders."""

    table, key = "mails", "subject"

    def list(self, folder: Folder = "inbox") -> list[Row]:
        """Mails of a folder"""
        rows = self.store.all("SELECT id, sender, subject FROM mails WHERE folder = ? ORDER BY id", folder)
        return [dict(zip(("id", "sender", "subject"), row, strict=True)) for row in rows]

    def search(self, query: str) -> list[Row]:
        """Find mails by subject"""
        return self._find(query)

    def read(self, id: int) -> Row:
        """Show a mail"""
        mail = self._get(id)
        return {name: mail[name] for name in ("sender", "subject", "body")}

    def send(self, to: str, subject: str, body: str) -> int:
        """Send a mail"""
        return self.store.insert("mails", folder="sent", recipient=self._address(to), subject=subject, body=body)

    def reply(self, id: int, body: str) -> int:
        """Answer a mail"""
        mail = self._get(id)
        return self.store.insert(
            "mails", folder="sent", recipient=self._address(mail["sender"]), subject=f"Re: {mail['subject']}", body=body
        )

    def forward(self, id: int, to: str) -> int:
        """Forward a mail"""
        mail = self._get(id)
        return self.store.insert(
            "mails", folder="sent", recipient=self._address(to), subject=f"Fwd: {mail['subject']}", body=mail["body"]
        )

    def delete(self, id: int) -> str:
        """Delete a mail"""
        return self._remove(id)

    def move(self, id: int, folder: Folder) -> str:
        """Move a mail to a folder"""
        return self._set(id, folder=folder)

    def star(self, id: int) -> str:
        """Star a mail"""
        return self._set(id, starred=1)

    def unstar(self, id: int) -> str:
        """Remove a star"""
        return self._set(id, starred=0)

    def mark_read(self, id: int) -> str:
        """Mark a mail as read"""
        return self._set(id, unread=0)

    def mark_unread(self, id: int) -> str:
        """Mark a mail as unread"""
        return self._set(id, unread=1)

    def count(self, folder: Folder = "inbox") -> int:
        """Number of mails of a folder"""
        return self._count("folder = ?", folder)

    def _address(self, text: str) -> str:
        name, at, domain = text.partition("@")
        if not (name and at and domain) or " " in text:
            raise AppError(f"{text[:40]!r} is no mail address")
        return text
