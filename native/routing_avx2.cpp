#define DELTAWIRE_ROUTING_KERNEL decode_routing_avx2
#include "routing_impl.hpp"
