// The Python bindings of the codec. All slow operations run without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "codec.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace deltawire {
namespace {

using Array = nb::ndarray<nb::ro, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Type = std::tuple<uint8_t, uint8_t, uint8_t, uint8_t>;  // code, bytes, exponent shift, exponent bits

ElementType element_type(const Type& t) {
    const auto [code, bytes, shift, bits] = t;
    if ((bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8) || bits > 11 || shift + bits > bytes * 8) throw std::invalid_argument("the element type is not valid");
    return {code, bytes, shift, bits};
}

View view_of(const Array& array) {
    View v;
    v.data = const_cast<uint8_t*>(static_cast<const uint8_t*>(array.data()));
    v.count = array.size();
    v.bytes = uint8_t(array.itemsize());
    int64_t expected = v.bytes;
    v.contiguous = reinterpret_cast<uintptr_t>(v.data) % v.bytes == 0;  // unaligned elements are copied, like strided ones
    for (size_t d = array.ndim(); d-- > 0;) {
        const int64_t stride = array.stride(d) * int64_t(v.bytes);
        v.contiguous &= array.shape(d) == 1 || stride == expected || !v.count;
        expected *= int64_t(array.shape(d));
        v.shape.insert(v.shape.begin(), array.shape(d));
        v.strides.insert(v.strides.begin(), stride);
    }
    if (v.shape.empty()) {
        v.shape = {1};
        v.strides = {v.bytes};
    }
    return v;
}

View zeros(uint64_t count, uint8_t bytes) {
    View v;
    v.count = count;
    v.bytes = bytes;
    return v;
}

View checked_view(const Array& array, const ElementType& type) {
    View v = view_of(array);
    if (v.bytes != type.bytes) throw std::invalid_argument("array and element type differ in width");
    return v;
}

const Kernels& kernels_named(const std::string& name) {
    for (const Kernels* k : available_kernels())
        if (name == k->name) return *k;
    throw std::invalid_argument("no such instruction set on this machine: " + name);
}

nb::tuple tuple_of(const Lanes& lanes) { return nb::make_tuple(lanes[0], lanes[1], lanes[2], lanes[3]); }

// Passes bytes from C++ to Python without a copy.
nb::object own(std::vector<uint8_t>&& bytes) {
    auto* held = new std::vector<uint8_t>(std::move(bytes));
    nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::vector<uint8_t>*>(p); });
    return nb::cast(nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(held->data(), {held->size()}, owner));
}

using PyEncodeJob = std::tuple<nb::object, Array, Type, uint64_t>;

std::vector<nb::tuple> py_encode(const std::vector<PyEncodeJob>& jobs, unsigned threads, const std::string& isa) {
    std::vector<EncodeJob> native;
    std::vector<Array> held;
    for (const auto& [base, next, type, seed] : jobs) {
        const ElementType element = element_type(type);
        View next_view = checked_view(next, element), base_view = zeros(next_view.count, element.bytes);
        if (!base.is_none()) {
            held.push_back(nb::cast<Array>(base));
            base_view = checked_view(held.back(), element);
            if (base_view.count != next_view.count) throw std::invalid_argument("base and new differ in size");
        }
        native.push_back({std::move(base_view), std::move(next_view), element, seed});
    }
    const Kernels& kernels = kernels_named(isa);
    std::vector<Encoded> results;
    {
        nb::gil_scoped_release release;
        results = encode(native, threads, kernels);
    }
    std::vector<nb::tuple> out;
    for (Encoded& e : results) {
        nb::list blocks;
        for (auto& block : e.blocks) blocks.append(own(std::move(block)));
        out.push_back(nb::make_tuple(blocks, e.changed, tuple_of(e.before), tuple_of(e.after)));
    }
    return out;
}

using PyResolveJob = std::tuple<nb::object, uint64_t, nb::object, Type, uint64_t, bool>;

// A Resolution together with the Python objects whose memory it refers to.
class PyResolution {
public:
    PyResolution(unsigned threads, size_t budget, bool defer, const std::string& isa)
        : resolution_(threads, budget, defer, kernels_named(isa)) {}

    std::vector<nb::tuple> add(const std::vector<PyResolveJob>& jobs) {
        std::vector<ResolveJob> native;
        for (const auto& [base, count, payload, type, seed, write] : jobs) {
            const ElementType element = element_type(type);
            View view = zeros(count, element.bytes);
            if (!base.is_none()) {
                arrays_.push_back(nb::cast<Array>(base));
                view = checked_view(arrays_.back(), element);
            }
            std::span<const uint8_t> bytes;
            if (!payload.is_none()) {
                payloads_.push_back(nb::cast<Bytes>(payload));
                bytes = {payloads_.back().data(), payloads_.back().size()};
            }
            native.push_back({std::move(view), bytes, !payload.is_none(), element, seed, write && !base.is_none()});
        }
        std::vector<Resolution::Tensor> results;
        {
            nb::gil_scoped_release release;
            results = resolution_.add(std::move(native));
        }
        std::vector<nb::tuple> out;
        for (size_t i = 0; i < results.size(); ++i) {
            const auto& [base, count, payload, type, seed, write] = jobs[i];
            tensors_.push_back({results[i].changed, count, std::get<1>(type)});
            out.push_back(nb::make_tuple(results[i].changed, tuple_of(results[i].before), tuple_of(results[i].after)));
        }
        return out;
    }

    // The caller makes the arrays `indices` and `values` with the right sizes.
    void extract(size_t tensor, nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig> indices, nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig> values) {
        const auto& [changed, count, width] = tensors_.at(tensor);
        if (indices.size() != changed || values.size() != changed * width) throw std::invalid_argument("an array has the wrong size");
        nb::gil_scoped_release release;
        resolution_.extract(tensor, indices.data(), values.data());
    }

    void extract_dense(size_t tensor, nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig> out) {
        const auto& [changed, count, width] = tensors_.at(tensor);
        if (out.size() != count * width) throw std::invalid_argument("an array has the wrong size");
        nb::gil_scoped_release release;
        resolution_.extract_dense(tensor, out.data());
    }

    void exchange() {
        nb::gil_scoped_release release;
        resolution_.exchange();
    }

    void compact() {
        payloads_.clear();
        resolution_.compact();
    }

    void settle() {
        nb::gil_scoped_release release;
        resolution_.settle();
    }

    void revert() {
        nb::gil_scoped_release release;
        resolution_.revert();
    }

private:
    struct Tensor {
        uint64_t changed, count;
        uint8_t width;
    };
    std::vector<Array> arrays_;
    std::vector<Bytes> payloads_;
    std::vector<Tensor> tensors_;
    Resolution resolution_;
};

void py_write_elements(const Array& array, nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig> indices, const Bytes& values) {
    const View view = view_of(array);
    if (values.size() != indices.size() * view.bytes) throw std::invalid_argument("an array has the wrong size");
    nb::gil_scoped_release release;
    for (size_t i = 0; i < indices.size(); ++i)
        if (uint64_t(indices(i)) >= view.count) throw std::out_of_range("an index is outside the array");
    write_elements(view, indices.data(), values.data(), indices.size());
}

std::vector<nb::tuple> py_digest(const std::vector<std::pair<Array, uint64_t>>& arrays, unsigned threads, const std::string& isa) {
    std::vector<DigestJob> jobs;
    for (const auto& [array, seed] : arrays) jobs.push_back({view_of(array), seed});
    const Kernels& kernels = kernels_named(isa);
    std::vector<Lanes> lanes;
    {
        nb::gil_scoped_release release;
        lanes = digest(jobs, threads, kernels);
    }
    std::vector<nb::tuple> out;
    for (const Lanes& l : lanes) out.push_back(tuple_of(l));
    return out;
}

nb::tuple py_inspect(const Bytes& payload, const Type& type) {
    const PayloadFacts facts = inspect({payload.data(), payload.size()}, element_type(type));
    nb::list chunks;
    for (const auto& c : facts.chunks) chunks.append(nb::make_tuple(unsigned(c.mode), c.elements, c.changed, c.bytes));
    return nb::make_tuple(chunks, facts.bodies.changes_by_mode, facts.bodies.steps_by_length);
}

}  // namespace
}  // namespace deltawire

NB_MODULE(_native, m) {
    using namespace deltawire;
    nb::exception<Corrupt>(m, "Corrupt");
    nb::exception<WrongType>(m, "WrongType");
    nb::exception<WrongCount>(m, "WrongCount");
    m.def("instruction_sets", [] {
        std::vector<std::string> names;
        for (const Kernels* k : available_kernels()) names.emplace_back(k->name);
        return names;
    });
    m.def("encode", &py_encode, "jobs"_a, "threads"_a, "isa"_a);
    m.def("digest", &py_digest, "arrays"_a, "threads"_a, "isa"_a);
    m.def("write_elements", &py_write_elements, "array"_a, "indices"_a, "values"_a);
    m.def("inspect", &py_inspect, "payload"_a, "type"_a);
    nb::class_<PyResolution>(m, "Resolution")
        .def(nb::init<unsigned, size_t, bool, const std::string&>(), "threads"_a, "budget"_a, "defer"_a, "isa"_a)
        .def("add", &PyResolution::add, "jobs"_a)
        .def("extract", &PyResolution::extract, "tensor"_a, "indices"_a, "values"_a)
        .def("extract_dense", &PyResolution::extract_dense, "tensor"_a, "out"_a)
        .def("exchange", &PyResolution::exchange)
        .def("compact", &PyResolution::compact)
        .def("settle", &PyResolution::settle)
        .def("revert", &PyResolution::revert);
}
