// Before anything is painted: the theme that was chosen here, if it is not the system's.
const chosen = localStorage.getItem("dflockd-theme");
if (chosen) document.documentElement.dataset.theme = chosen;
