#pragma once

#include <nanobind/nanobind.h>

namespace deltawire {

// Adds the functions of quantising to the module.
void bind_quantise(nanobind::module_& m);

}  // namespace deltawire
