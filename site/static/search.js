// Opened from a folder, a page may not read other pages: the results of a search then come without excerpts.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
