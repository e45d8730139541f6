// Boxes that scroll can be reached with the keyboard; search shows no summaries where pages cannot be read by a script.

if (typeof DOCUMENTATION_OPTIONS !== "undefined" && location.protocol === "file:") {
  DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false; // a page opened from the disk may not fetch other files
}

function makeScrollable() {
  for (const box of document.querySelectorAll(".table-wrapper, article pre, .math-block, .toc-scroll, .sidebar-scroll")) {
    const scrolls = box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight;
    if (scrolls) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}

window.addEventListener("load", makeScrollable);
window.addEventListener("resize", makeScrollable);
