"""The playground: a page, and a widget, in which a Hopfield network settles four ways side by side."""
