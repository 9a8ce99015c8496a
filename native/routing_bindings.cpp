// The Python bindings of routed experts.
#include "routing_bindings.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "kernels.hpp"
#include "routing.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace deltawire {
namespace {

template <class T>
using Flat = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Experts = nb::ndarray<int16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
std::span<const T> span_of(const Flat<T>& array) {
    return {array.data(), array.size()};
}

// The arrays belong to the caller.
RoutingRows rows_of(unsigned layers, unsigned top_k, unsigned experts, const Flat<int64_t>& copied, const Flat<int64_t>& reference, const Flat<uint8_t>& recorded,
                    const Flat<uint16_t>& order) {
    RoutingRows rows{layers, top_k, experts, span_of(copied), span_of(reference), span_of(recorded), span_of(order)};
    const size_t tokens = rows.tokens();
    bool fits = layers && layers <= kRoutingMaxLayers && top_k && top_k <= kRoutingMaxTopK && top_k <= experts && experts <= kRoutingMaxExperts;
    fits &= rows.reference.size() == tokens && rows.recorded.size() == tokens * layers && rows.order.size() == size_t(layers) * experts;
    for (size_t t = 0; fits && t < tokens; ++t) fits &= rows.copied[t] < int64_t(t) && rows.reference[t] < int64_t(t);
    for (const uint16_t expert : rows.order) fits &= expert < experts;
    if (!fits) throw std::invalid_argument("the rows of routed experts do not fit together");
    return rows;
}

nb::object own_bytes(const std::vector<uint8_t>& bytes) { return nb::bytes(bytes.data(), bytes.size()); }

void py_decode(unsigned layers, unsigned top_k, unsigned experts, const Flat<int64_t>& copied, const Flat<int64_t>& reference, const Flat<uint8_t>& recorded,
               const Flat<uint16_t>& order, const Flat<uint8_t>& lengths, const Flat<uint64_t>& ends, const Flat<uint8_t>& data, const Experts& out, unsigned threads,
               const std::string& isa) {
    const RoutingRows rows = rows_of(layers, top_k, experts, copied, reference, recorded, order);
    if (out.size() != rows.recorded.size() * top_k) throw std::invalid_argument("the rows of routed experts do not fit together");
    nb::gil_scoped_release release;
    decode_routing(rows, span_of(lengths), span_of(ends), span_of(data), {out.data(), out.size()}, threads, isa != "scalar");
}

// Calls `choose` with the counts of all symbols, which returns the lengths of their codes. Returns the lengths and the bytes of each stream.
nb::tuple py_encode(unsigned layers, unsigned top_k, unsigned experts, const Flat<int64_t>& copied, const Flat<int64_t>& reference, const Flat<uint8_t>& recorded,
                    const Flat<uint16_t>& order, const Flat<int16_t>& ids, const nb::callable& choose) {
    const RoutingRows rows = rows_of(layers, top_k, experts, copied, reference, recorded, order);
    if (ids.size() != rows.recorded.size() * top_k) throw std::invalid_argument("the rows of routed experts do not fit together");
    RoutingSymbols symbols;
    {
        nb::gil_scoped_release release;
        for (size_t row = 0; row < rows.recorded.size(); ++row)
            for (unsigned j = 0; rows.recorded[row] && j < top_k; ++j)
                if (const int16_t id = ids.data()[row * top_k + j]; id < 0 || unsigned(id) >= experts) throw Corrupt("routed experts name an expert that is not there.");
        symbols = find_routing_symbols(rows, span_of(ids));
    }
    const nb::object chosen = choose(symbols.counts);
    const auto lengths = nb::cast<std::vector<uint8_t>>(chosen);
    if (lengths.size() != symbols.counts.size()) throw std::invalid_argument("there are not as many codes as symbols");
    std::vector<std::vector<uint8_t>> streams;
    {
        nb::gil_scoped_release release;
        streams = write_routing(rows, symbols, lengths);
    }
    nb::list out;
    for (const auto& stream : streams) out.append(own_bytes(stream));
    return nb::make_tuple(own_bytes(lengths), out);
}

}  // namespace

void bind_routing(nb::module_& m) {
    m.def("decode_routing", &py_decode, "layers"_a, "top_k"_a, "experts"_a, "copied"_a, "reference"_a, "recorded"_a, "order"_a, "lengths"_a, "ends"_a, "data"_a,
          "out"_a, "threads"_a, "isa"_a);
    m.def("encode_routing", &py_encode, "layers"_a, "top_k"_a, "experts"_a, "copied"_a, "reference"_a, "recorded"_a, "order"_a, "ids"_a, "choose"_a);
}

}  // namespace deltawire
