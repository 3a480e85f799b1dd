"""One module for each kernel family, of its name; `entries()` yields its operators on the shapes that matter."""
