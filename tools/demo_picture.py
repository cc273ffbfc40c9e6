"""Draw docs/demo.svg: the last picture and the result of a real `expertctl demo`.

.venv/bin/python tools/demo_picture.py [OUT]
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console

from expertctl.demo.live import picture
from expertctl.demo.performance import DemoPlan, perform
from expertctl.demo.state import DemoState, result_text
from expertctl.demo.view import PlainView

WIDTH = 118


class LastPicture(PlainView):
    """Keeps the last state that was shown."""

    state: DemoState | None = None

    def show(self, state: DemoState) -> None:
        self.state = state


def main() -> None:
    """Run the demo once and write the picture."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/demo.svg")
    view = LastPicture()
    with perform(DemoPlan.make(None, "25%", 3, 64), view) as (result, _):
        assert view.state is not None
        console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
        console.print("$ make demo", style="bold", highlight=False)
        console.print(picture(view.state, WIDTH))
        console.print(result_text(result), highlight=False, markup=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    console.save_svg(str(out), title="expertctl demo")
    print(out)


if __name__ == "__main__":
    main()
