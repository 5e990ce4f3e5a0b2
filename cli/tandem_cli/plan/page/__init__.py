"""The page of `tandem plan --html`: two architectures on one workload, simulated in the browser.

`data` says what is known of the model and its GPU, `page` puts it into one HTML file. `kernel.js`
is the simulation (`tandem_planner.simulation` in JavaScript), `model.js` the state of the page and
what is measured, `timeline.js` and `charts.js` draw, `page.js` connects them with the controls.
"""

from .data import PageData, page_data
from .page import page

__all__ = ["PageData", "page", "page_data"]
