"""nbconvert's settings for printing an executed notebook as a report of a few pages.

    jupyter nbconvert --config notebooks/pages/config.py out.ipynb

This needs the package playwright and its browser; nbconvert says how to get what is missing.
`--to html` needs neither.
"""

from pathlib import Path

c = get_config()  # noqa: F821 - nbconvert defines it
c.NbConvertApp.export_format = "webpdf"
c.TemplateExporter.extra_template_basedirs = [str(Path(__file__).parents[1])]
c.TemplateExporter.template_name = Path(__file__).parent.name
c.TemplateExporter.exclude_input = True
c.TagRemovePreprocessor.enabled = True
c.TagRemovePreprocessor.remove_cell_tags = {"bootstrap", "setup", "parameters", "commands"}
