"use strict";
// Sends the next step of a long action. Without scripts, the button does.
document.querySelector("form[data-alkstore-continue]").submit();
