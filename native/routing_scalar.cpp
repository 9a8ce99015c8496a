#define DELTAWIRE_ROUTING_KERNEL decode_routing_scalar
#include "routing_impl.hpp"
