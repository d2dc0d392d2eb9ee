"""Shop and files."""

from __future__ import annotations

from codechat.tasks.apps.app import App
from codechat.tasks.apps.store import AppError, Row


class Shop(App):
    """Products, a cart, orders and wishes."""

    table, key = "products", "name"

    def search(self, query: str) -> list[Row]:
        """Find products by name"""
        return self._find(query)

    def get(self, id: int) -> Row:
        """Show a product"""
        return self._shown(id)

    def cart(self) -> list[Row]:
        """What is in the cart"""
        return self._table("cart", "product", "quantity")

    def add_to_cart(self, product: int, quantity: int = 1) -> str:
        """Put a product into the cart"""
        held = self._held("cart", product)
        self._in_stock(product, quantity + (held[1] if held else 0))
        if held:
            self.store.set("cart", held[0], quantity=held[1] + quantity)
        else:
            self.store.insert("cart", product=product, quantity=quantity)
        return "ok"

    def remove_from_cart(self, product: int) -> str:
        """Take a product out of the cart"""
        self.store.remove("cart", self._required("cart", product))
        return "ok"

    def set_quantity(self, product: int, quantity: int) -> str:
        """Change how many are in the cart"""
        held = self._required("cart", product)
        self._in_stock(product, quantity)
        self.store.set("cart", held, quantity=quantity)
        return "ok"

    def checkout(self) -> int:
        """Order what is in the cart"""
        held = self.store.all("SELECT product, quantity FROM cart")
        if not held:
            raise AppError("the cart is empty")
        for product, quantity in held:
            self._in_stock(product, quantity)
        for product, quantity in held:
            self.store.insert("orders", product=product, quantity=quantity)
            self.store.set("products", product, stock=self._get(product)["stock"] - quantity)
        self.store.all("DELETE FROM cart")
        return len(held)

    def orders(self) -> list[Row]:
        """All orders"""
        return self._table("orders", "id", "product", "status")

    def get_order(self, id: int) -> Row:
        """Show an order"""
        return self.store.row("orders", id)

    def cancel_order(self, id: int) -> str:
        """Cancel an order"""
        return self._pass_on(id, "placed", "cancelled")

    def return_order(self, id: int) -> str:
        """Send an order back"""
        return self._pass_on(id, "delivered", "returned")

    def wishes(self) -> list[Row]:
        """The wish list"""
        return self._table("wishes", "product")

    def wish(self, product: int) -> str:
        """Put a product on the wish list"""
        self._get(product)
        if self.store.one("SELECT id FROM wishes WHERE product = ?", product):
            raise AppError(f"product {product} is on the wish list already")
        self.store.insert("wishes", product=product)
        return "ok"

    def unwish(self, product: int) -> str:
        """Take a product off the wish list"""
        self.store.remove("wishes", self._required("wishes", product))
        return "ok"

    def _table(self, table: str, *names: str) -> list[Row]:
        return [
            dict(zip(names, row, strict=True))
            for row in self.store.all(f"SELECT {', '.join(names)} FROM {table} ORDER BY id")
        ]

    def _held(self, table: str, product: int) -> tuple[int, ...] | None:
        return self.store.one(
            f"SELECT * FROM (SELECT id, {'quantity' if table == 'cart' else '1'} FROM {table} WHERE product = ?)",
            product,
        )

    def _required(self, table: str, product: int) -> int:
        held = self._held(table, product)
        if held is None:
            raise AppError(f"product {product} is not in {table}")
        return held[0]

    def _in_stock(self, product: int, quantity: int) -> None:
        stock = self._get(product)["stock"]
        if not 1 <= quantity <= stock:
            raise AppError(f"quantity {quantity}; {stock} are in stock")

    def _pass_on(self, id: int, status: str, following: str) -> str:
        now = self.store.row("orders", id)["status"]
        if now != status:
            raise AppError(f"order {id} is {now}, not {status}")
        self.store.set("orders", id, status=following)
        return "ok"


class Files(App):
    """Text files by path."""

    table, key = "files", "path"

    def list(self, folder: str = "") -> list[str]:
        """Paths in a folder"""
        return [
            path for (path,) in self.store.all("SELECT path FROM files WHERE instr(path, ?) = 1 ORDER BY path", folder)
        ]

    def search(self, query: str) -> list[str]:
        """Find files by path"""
        return [row["path"] for row in self._find(query)]

    def read(self, path: str) -> str:
        """Text of a file"""
        return self._get(self._at(path))["text"]

    def write(self, path: str, text: str) -> str:
        """Write a new file"""
        self._free(path)
        self.store.insert("files", path=path, text=text)
        return "ok"

    def replace(self, path: str, text: str) -> str:
        """Replace the text of a file"""
        return self._set(self._at(path), text=text)

    def append(self, path: str, text: str) -> str:
        """Add to the text of a file"""
        at = self._at(path)
        return self._set(at, text=f"{self._get(at)['text']} {text}".strip())

    def delete(self, path: str) -> str:
        """Delete a file"""
        return self._remove(self._at(path))

    def copy(self, path: str, to: str) -> str:
        """Copy a file"""
        text = self.read(path)
        return self.write(to, text)

    def move(self, path: str, to: str) -> str:
        """Move a file"""
        at = self._at(path)
        self._free(to)
        return self._set(at, path=to)

    def share(self, path: str, guest: str) -> str:
        """Share a file"""
        return self._set(self._at(path), shared=guest)

    def unshare(self, path: str) -> str:
        """Stop sharing a file"""
        return self._set(self._at(path), shared="")

    def size(self, path: str) -> int:
        """Characters of a file"""
        return len(self.read(path))

    def count(self, folder: str = "") -> int:
        """Number of files in a folder"""
        return self._count("instr(path, ?) = 1", folder)

    def _at(self, path: str) -> int:
        found = self.store.one("SELECT id FROM files WHERE path = ?", path)
        if found is None:
            raise AppError(f"there is no file {path[:60]!r}")
        return found[0]

    def _free(self, path: str) -> None:
        if not path.strip() or self.store.one("SELECT id FROM files WHERE path = ?", path):
            raise AppError(f"{path[:60]!r} is no free path")
