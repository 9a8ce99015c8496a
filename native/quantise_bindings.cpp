// The Python bindings of quantising. All functions run without the GIL.
#include "quantise_bindings.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <optional>

#include "exact_arithmetic.hpp"
#include "quantise.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace deltawire {
namespace {

using Addresses = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Codes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using GivenFloats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

QuantiseRule rule_of(unsigned kind, uint32_t group) {
    const bool grouped = kind >= unsigned(RecipeKind::nvfp4);
    const bool right = kind == unsigned(RecipeKind::nvfp4) ? group == 16 : kind == unsigned(RecipeKind::mxfp4) ? group == 32 : group == 32 || group == 128;
    if (kind > unsigned(RecipeKind::int4) || (grouped ? !right : group != 0)) throw std::invalid_argument("there is no such recipe");
    return {RecipeKind(kind), group};
}

Rows rows_of(const QuantiseRule& rule, uint64_t address, int64_t stride, int64_t rows, int64_t columns, unsigned source) {
    if (source > 2 || rows < 0 || columns < 1 || rows >= int64_t(1) << 31 || columns >= int64_t(1) << 31) throw std::invalid_argument("rows are not valid");
    if (rule.group && columns % rule.group) throw std::invalid_argument("the columns are not a whole number of groups");
    return {reinterpret_cast<const uint8_t*>(address), stride, uint32_t(rows), uint32_t(columns), Source(source)};
}

// Reads the columns of a table of weights. The caller guarantees that the addresses are those of arrays with the right sizes, and keeps the arrays alive.
std::vector<QuantiseWeight> weights_of(const QuantiseRule& rule, const Addresses& data, const Numbers& strides, const Numbers& rows, const Numbers& columns,
                                       const Codes& sources, const Addresses& codes, const Addresses& scales, const Addresses& globals,
                                       const Addresses& previous, const Addresses& previous_globals, const Numbers& groups) {
    const size_t n = data.size();
    for (const size_t size : {strides.size(), rows.size(), columns.size(), sources.size(), codes.size(), scales.size(), globals.size(), previous.size(),
                              previous_globals.size(), groups.size()})
        if (size != n) throw std::invalid_argument("the columns of the table differ in length");
    std::vector<QuantiseWeight> weights(n);
    for (size_t i = 0; i < n; ++i) {
        QuantiseWeight& w = weights[i];
        w.rows = rows_of(rule, data(i), strides(i), rows(i), columns(i), sources(i));
        w.codes = reinterpret_cast<uint8_t*>(codes(i));
        w.scales = reinterpret_cast<uint8_t*>(scales(i));
        w.global_scale = reinterpret_cast<float*>(globals(i));
        w.previous = reinterpret_cast<const uint8_t*>(previous(i));
        w.previous_global = reinterpret_cast<const float*>(previous_globals(i));
        if (groups(i) < 0 || size_t(groups(i)) >= n) throw std::invalid_argument("a group has a number that is too large");
        w.group = uint32_t(groups(i));
    }
    return weights;
}

void init_quantisation(Quantisation* self, unsigned kind, uint32_t group, const Addresses& data, const Numbers& strides, const Numbers& rows,
                       const Numbers& columns, const Codes& sources, const Addresses& codes, const Addresses& scales, const Addresses& globals,
                       const Addresses& previous, const Addresses& previous_globals, const Numbers& groups, bool keeps_codes, const std::string& isa) {
    const QuantiseRule rule = rule_of(kind, group);
    new (self) Quantisation(rule, weights_of(rule, data, strides, rows, columns, sources, codes, scales, globals, previous, previous_globals, groups),
                            keeps_codes, quantise_kernels(isa));
}

nb::object py_first_nonfinite(const Quantisation& made) {
    const size_t found = made.first_nonfinite();
    return found == kAllFinite ? nb::none() : nb::cast(found);
}

nb::object py_quantise(unsigned kind, uint32_t group, const Addresses& data, const Numbers& strides, const Numbers& rows, const Numbers& columns,
                       const Codes& sources, const Addresses& codes, const Addresses& scales, const Addresses& globals, const Addresses& previous,
                       const Addresses& previous_globals, const Numbers& groups, unsigned threads, const std::string& isa) {
    const QuantiseRule rule = rule_of(kind, group);
    Quantisation made(rule, weights_of(rule, data, strides, rows, columns, sources, codes, scales, globals, previous, previous_globals, groups), true,
                      quantise_kernels(isa));
    {
        nb::gil_scoped_release release;
        made.finish(threads);
    }
    return py_first_nonfinite(made);
}

void py_block_maxima(unsigned kind, uint32_t group, uint64_t address, int64_t stride, int64_t rows, int64_t columns, unsigned source, uint32_t first_row,
                     const Floats& out, unsigned threads, const std::string& isa) {
    const QuantiseRule rule = rule_of(kind, group);
    const Rows given = rows_of(rule, address, stride, rows, columns, source);
    const QuantiseKernels& kernels = quantise_kernels(isa);
    const size_t grid_rows = rule.is_block() ? (first_row % kBlockRows + size_t(rows) + kBlockRows - 1) / kBlockRows : rule.kind == RecipeKind::fp8_tensor ? 1 : size_t(rows);
    if (out.shape(0) != grid_rows || out.shape(1) != rule.scales_in_row(given.columns)) throw std::invalid_argument("an array has the wrong size");
    nb::gil_scoped_release release;
    block_maxima(rule, given, first_row, out.data(), threads, kernels);
}

void py_encode_codes(unsigned kind, uint32_t group, uint64_t address, int64_t stride, int64_t rows, int64_t columns, unsigned source, uint32_t first_row,
                     const GivenFloats& divisors, const Bytes& codes, unsigned threads, const std::string& isa) {
    const QuantiseRule rule = rule_of(kind, group);
    const Rows given = rows_of(rule, address, stride, rows, columns, source);
    const QuantiseKernels& kernels = quantise_kernels(isa);
    const size_t grid_rows = rule.is_block() ? (first_row % kBlockRows + size_t(rows) + kBlockRows - 1) / kBlockRows : rule.kind == RecipeKind::fp8_tensor ? 1 : size_t(rows);
    if (divisors.shape(0) != grid_rows || divisors.shape(1) != rule.scales_in_row(given.columns) || codes.size() != rule.code_bytes(size_t(rows) * given.columns))
        throw std::invalid_argument("an array has the wrong size");
    nb::gil_scoped_release release;
    encode_codes(rule, given, first_row, divisors.data(), codes.data(), threads, kernels);
}

// `ExactArithmetic` as a context manager, for the thread that enters it.
class ExactScope {
public:
    void enter() { exact_.emplace(); }
    void exit(const nb::args&) { exact_.reset(); }

private:
    std::optional<ExactArithmetic> exact_;
};

}  // namespace

void bind_quantise(nb::module_& m) {
    m.def("quantise", &py_quantise, "kind"_a, "group"_a, "data"_a, "strides"_a, "rows"_a, "columns"_a, "sources"_a, "codes"_a, "scales"_a, "globals"_a,
          "previous"_a, "previous_globals"_a, "groups"_a, "threads"_a, "isa"_a);
    nb::class_<Quantisation, Preparation>(m, "Quantisation")
        .def("__init__", &init_quantisation, "kind"_a, "group"_a, "data"_a, "strides"_a, "rows"_a, "columns"_a, "sources"_a, "codes"_a, "scales"_a,
             "globals"_a, "previous"_a, "previous_globals"_a, "groups"_a, "keeps_codes"_a, "isa"_a)
        .def("finish", &Quantisation::finish, "threads"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("first_nonfinite", &py_first_nonfinite);
    nb::class_<ExactScope>(m, "ExactArithmetic").def(nb::init<>()).def("__enter__", &ExactScope::enter).def("__exit__", &ExactScope::exit);
    m.def("block_maxima", &py_block_maxima, "kind"_a, "group"_a, "address"_a, "stride"_a, "rows"_a, "columns"_a, "source"_a, "first_row"_a, "out"_a,
          "threads"_a, "isa"_a);
    m.def("encode_codes", &py_encode_codes, "kind"_a, "group"_a, "address"_a, "stride"_a, "rows"_a, "columns"_a, "source"_a, "first_row"_a, "divisors"_a,
          "codes"_a, "threads"_a, "isa"_a);
}

}  // namespace deltawire
