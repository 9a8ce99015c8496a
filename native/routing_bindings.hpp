#pragma once

#include <nanobind/nanobind.h>

namespace deltawire {

// Adds the functions of routed experts to the module.
void bind_routing(nanobind::module_& m);

}  // namespace deltawire
