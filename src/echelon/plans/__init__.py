"""Share a model among all ranks by one description of all axes.

``axes``         the lengths of the axes as text; knows no torch
``plans``        ``Plan``: the axes and their options, refused at once where they do not fit
``parallelize``  a plan applied to a model
``plan_view``    what ``ec.show`` says about a plan
"""

import echelon.plans.plan_view  # noqa: F401  # gives Plan its view
