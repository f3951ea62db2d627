// A browser scrolls with the keyboard what has the focus. So what is wider than its column gets one, and
// what fits stays out of the way of the Tab key.
function letTheKeyboardScroll() {
  for (const each of document.querySelectorAll(".highlight pre, .table-wrapper")) {
    if (each.scrollWidth > each.clientWidth) each.tabIndex = 0;
    else each.removeAttribute("tabindex");
  }
}

addEventListener("load", letTheKeyboardScroll);
addEventListener("resize", letTheKeyboardScroll);
